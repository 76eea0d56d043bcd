#!/usr/bin/env bash
# Assembles the checked-in PTX for every architecture that people own, and prints what each kernel
# takes: registers, shared memory, stack, spills. Fails where ptxas fails or a kernel spills.
#
#   tools/ptxas.sh            all of it
#   tools/ptxas.sh --find     prints the ptxas that would be used
#   tools/ptxas.sh --cubin D  also keeps the cubins in folder D (for nvdisasm)
#
# ptxas comes from $PTXAS, PATH, a CUDA toolkit, or the PyPI package nvidia-cuda-nvcc.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${ANSATZ_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/ansatz/cuda}
find_ptxas() {
    local c
    for c in "${PTXAS:-}" "$(command -v ptxas || true)" /usr/local/cuda/bin/ptxas \
        "$venv"/lib/python3*/site-packages/nvidia/cu*/bin/ptxas \
        "$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null || true)"/cu*/bin/ptxas; do
        [ -n "$c" ] && [ -x "$c" ] && { echo "$c"; return; }
    done
    echo "ptxas not found: pip install nvidia-cuda-nvcc, or set PTXAS" >&2
    return 1
}

ptxas=$(find_ptxas)
cubins=$(mktemp -d)
trap 'rm -rf "$cubins"' EXIT
case "${1:-}" in
--find) echo "$ptxas"; exit ;;
--cubin) mkdir -p "$2"; cubins=$2; trap - EXIT ;;
esac

"$ptxas" --version | tail -n 1
status=0
for pair in sm_80:sm_80 sm_90:sm_90 sm_90:sm_120; do
    ptx=gpu/ptx/gpu_${pair%:*}.ptx
    arch=${pair#*:}
    log=$cubins/$arch.log
    "$ptxas" -v -arch="$arch" "$ptx" -o "$cubins/gpu_$arch.cubin" 2>"$log" || { cat "$log" >&2; exit 1; }
    awk -v arch="$arch" '
        /Compiling entry function/ { split($0, q, "\x27"); kernel = q[2] }
        /bytes stack frame/ { stack = $1; spill = 0; for (i = 1; i < NF; i++) if ($(i+1) == "bytes" && $(i+2) == "spill") spill += $i }
        /Used [0-9]+ registers/ {
            regs = 0; smem = 0
            for (i = 1; i < NF; i++) {
                if ($i == "Used") regs = $(i+1)
                if ($(i+1) == "bytes" && $(i+2) ~ /^smem/) smem = $i
            }
            printf "%-7s %-36s %4d registers %6d B shared %4d B stack %4d B spilled\n", arch, kernel, regs, smem, stack, spill
            # Triples need a table of 128 KiB, which no block of sm_120 has: they are never launched there.
            if (spill > 0 && !(arch == "sm_120" && kernel ~ /_triple$/)) bad = 1
        }
        END { exit bad }' "$log" || { echo "$arch: a kernel spills" >&2; status=1; }
done
exit $status
