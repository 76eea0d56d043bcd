#!/usr/bin/env bash
# Builds a folder that runs the GPU suite and the kernel bench on a machine with an NVIDIA driver
# and no Rust: test binaries, `host`, the model, run.sh.
#
#   tools/bundle.sh [FOLDER]        default: .bundle
set -euo pipefail
cd "$(dirname "$0")/.."
out=${1:-.bundle}

# Only what this script made is replaced.
if [ -e "$out" ] && [ ! -e "$out/COMMIT" ]; then
    echo "$out exists and is no bundle: name another folder" >&2
    exit 1
fi
rm -rf "$out"
mkdir -p "$out/tests"
git rev-parse HEAD >"$out/COMMIT"
cargo build --release
cargo test --release --workspace --no-run --message-format=json-render-diagnostics |
    python3 -c '
import json, sys
for line in sys.stdin:
    m = json.loads(line)
    if m.get("reason") == "compiler-artifact" and m["profile"]["test"] and m.get("executable"):
        if "test" in m["target"]["kind"]:
            print(m["target"]["name"], m["executable"])
        elif "lib" in m["target"]["kind"] and m["target"]["name"] == "host":
            print("units", m["executable"])
' >"$out/tests.list"
target=$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json,sys; print(json.load(sys.stdin)["target_directory"])')
cp "$target/release/host" "$out/host"
while read -r name path; do
    cp "$path" "$out/tests/$name"
done <"$out/tests.list"
rm "$out/tests.list"
strip "$out/host" "$out"/tests/*
cp -r models/sotu-row "$out/model"
mkdir -p "$out/data"
cp -r tests/data/. "$out/data/"
cp tools/bundle-run.sh "$out/run.sh"
du -sh "$out"
