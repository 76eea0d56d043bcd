#!/usr/bin/env python3
"""SASS instructions per nibble in the decoding loops of the coded kernels, by pipe.

    tools/ptxas.sh --cubin DIR && tools/sass.py DIR/gpu_sm_90.cubin [KERNEL ...]

A loop is what a backward branch spans; those with a vote for at least 8 groups are printed. Blocks
that a forward branch passes over and that copy a chunk of the stream or load scales run seldom or
not at all; they are left out of `hot`. Of `matmul_plane3*` the loop over pairs of steps is printed, 8 warp
rows of 32 nibbles a lane, and in it apart what adds 16 list entries a lane. nvdisasm comes from $NVDISASM, PATH, or the PyPI package
nvidia-cuda-nvdisasm.
"""
import collections
import glob
import os
import re
import shutil
import subprocess
import sys

ALU = {"LOP3", "SHF", "PRMT", "VIADD", "SEL", "ISETP", "LEA", "IADD3", "PLOP3", "MOV", "SGXT", "VIMNMX",
       "VIADDMNMX", "FSEL", "FSETP"}
FMA = {"IMAD", "IDP", "FFMA", "FMUL", "FADD"}
LSU = {"LDS", "STS", "LDG", "STG", "LDGSTS", "LD", "ST", "LDL", "STL"}


def nvdisasm():
    found = [os.environ.get("NVDISASM"), shutil.which("nvdisasm")]
    try:
        import nvidia
        found += glob.glob(f"{list(nvidia.__path__)[0]}/cu*/bin/nvdisasm")
    except ImportError:
        pass
    for path in found:
        if path and os.access(path, os.X_OK):
            return path
    sys.exit("nvdisasm not found: pip install nvidia-cuda-nvdisasm, or set NVDISASM")


def pipe(op):
    base = op.split(".")[0]
    if base.startswith("U"):
        return "uniform"
    return "alu" if base in ALU else "fma" if base in FMA else "lsu" if base in LSU else base.lower()


def functions(cubin):
    text = subprocess.run([nvdisasm(), "-c", cubin], capture_output=True, text=True, check=True).stdout
    parts = re.split(r"\.section\s+\.text\.([^,\s]+)", text)
    return dict(zip(parts[1::2], parts[2::2]))


def instructions(body):
    labels, found = {}, []
    for line in body.split("\n"):
        if m := re.match(r"(\.L_x_\d+):", line):
            labels[m[1]] = len(found)
        elif m := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            guard, op = re.match(r"(@!?U?P\w+\s+)?(\S+)", m[1]).groups()
            target = re.search(r"`\((\.L_x_\d+)\)", m[1]) if op.startswith("BRA") else None
            found.append((op, target[1] if target else None, bool(guard)))
    return [(op, labels.get(to), guarded) for op, to, guarded in found]


def report_plane3(kernel, code, loops):
    for start, end in sorted(loops, key=lambda loop: loop[1] - loop[0]):
        ops = [op for op, _, _ in code[start:end + 1]]
        if sum(op.startswith("IDP.2A") for op in ops) < 128:
            continue
        entries = set()
        atoms = [i for i in range(start, end + 1) if code[i][0].startswith("ATOMS")]
        for i in range(start, end + 1):
            to = code[i][1]
            if to is not None and i < to <= end + 1 and any(i < k < to for k in atoms) and \
                    not any(code[k][0].startswith("IDP.2A") for k in range(i + 1, to)):
                entries.update(range(i + 1, to))
        for name, n, kept in (("steps", 256, [k for k in range(start, end + 1) if k not in entries]),
                              ("list, per entry", 16, sorted(entries))):
            counts = collections.Counter(pipe(code[k][0]) for k in kept)
            pipes = ", ".join(f"{k} {v / n:.2f}" for k, v in counts.most_common(8))
            print(f"  {name}: {len(kept)} instructions = {len(kept) / n:.2f} ({pipes})")
        return


def report(kernel, body):
    code = instructions(body)
    loops = [(to, i) for i, (_, to, _) in enumerate(code) if to is not None and to <= i]
    nibbles = 6 if "triple" in kernel else 4
    print(f"{kernel}: {len(code)} instructions")
    if "plane3" in kernel:
        report_plane3(kernel, code, loops)
        return
    for start, end in sorted(loops):
        votes = [i for i in range(start, end + 1) if code[i][0].startswith("VOTE.ANY")]
        inner = [1 for a, b in loops if (a, b) != (start, end) and start <= a and b <= end
                 and any(a <= v <= b for v in votes)]
        if len(votes) < 8 or inner:
            continue
        cold = set()
        for i in range(start, end + 1):
            to = code[i][1]
            if to is not None and i < to <= end + 1:
                skipped = range(i + 1, to)
                if any(code[k][0].startswith(("LDGSTS", "LDG", "CALL")) for k in skipped) and \
                        not any(v in skipped for v in votes):
                    cold.update(skipped)
        hot = [code[i][0] for i in range(start, end + 1) if i not in cold]
        counts = collections.Counter(pipe(op) for op in hot)
        n = len(votes) * nibbles
        pipes = ", ".join(f"{k} {v / n:.2f}" for k, v in counts.most_common(8))
        gaps = sorted(b - a for a, b in zip(votes, votes[1:]))
        print(f"  {len(votes)} groups: {end + 1 - start} instructions, hot {len(hot)} = {len(hot) / n:.2f} "
              f"per nibble ({pipes}); {gaps[len(gaps) // 2]} from vote to vote")


def main():
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    bodies = functions(sys.argv[1])
    for kernel in sys.argv[2:] or sorted(k for k in bodies if "rans" in k or "matmul_plane3" in k):
        report(kernel, bodies[kernel])


main()
