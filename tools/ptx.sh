#!/usr/bin/env bash
# Makes the PTX in gpu/ptx from the sources in gpu, with a compiler for nvptx64 found on this machine.
#
#   tools/ptx.sh          writes gpu/ptx
#   tools/ptx.sh --find   prints the compiler that would be used; fails where there is none
set -euo pipefail
cd "$(dirname "$0")/.."
exec cargo run --release --quiet -p cuda_builder --example ptx -- "$@"
