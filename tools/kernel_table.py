#!/usr/bin/env python3
"""Markdown tables of what `host bench kernels --json` measured.

    tools/kernel_table.py FILE.json ... [--experts 8,24] [--tokens 1] [--stages gate-up,ffn] [--only times|bytes]

For each shape, kind of scales and device of each file two tables, a row for experts, tokens and stage, columns
for raw and for unfused and fused of each codec: microseconds (median) with raw-equivalent TB/s in brackets, and
MB of weights read; bytes of streams over bytes of int4, scales apart; share of the rate of a plain copy. What
was not measured stays empty. Decoding alone does not depend on the tokens: only its first row is printed.
Fails with one line where a file is no such output, where it holds a case twice, or where an output differs from
the reference in any bit. Standard library only.
"""
import argparse
import json
import math
import sys

STAGES = {"gate-up": "gate+up", "down": "down", "matrices": "gate+up, then down", "decode": "decode alone",
          "ffn": "whole FFN"}
FORMS = ("raw", "unfused", "fused")
TEXT = ("device", "scales", "stage", "form", "codec")
COUNT = ("hidden", "intermediate", "experts", "tokens", "bytes_read", "bits_of_difference")
NUMBER = ("microseconds", "raw_equivalent_gb_s", "ratio", "of_copy")


def count(x):
    return isinstance(x, int) and not isinstance(x, bool) and x >= 0


def number(x):
    return isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x) and x > 0


def fault(row):
    """What is wrong with a row, or None."""
    if not isinstance(row, dict):
        return "not an object"
    for names, fits in ((TEXT, lambda x: isinstance(x, str)), (COUNT, count), (NUMBER, number)):
        for name in names:
            if name not in row:
                return f"{name} is missing"
            if not fits(row[name]) and not (name == "of_copy" and row[name] is None):
                return f"{name} is {json.dumps(row[name])[:40]}"
    if row["stage"] not in STAGES:
        return f"unknown stage {row['stage'][:40]}"
    if row["form"] not in FORMS:
        return f"unknown form {row['form'][:40]}"
    if row["bits_of_difference"] != 0:
        return f"bits_of_difference is {row['bits_of_difference']}, not 0"
    return None


def read(path):
    """Rows of a file as {(device, H, I, scales): {(experts, tokens, stage): {(form, codec): row}}}."""
    try:
        with open(path, encoding="utf-8") as file:
            rows = json.load(file)
    except (OSError, ValueError, RecursionError) as e:
        sys.exit(f"{path}: {e}")
    if not isinstance(rows, list) or not rows:
        sys.exit(f"{path}: not the output of `host bench kernels --json`: a list of measurements is expected")
    groups = {}
    for i, row in enumerate(rows):
        if why := fault(row):
            sys.exit(f"{path}: measurement {i}: {why}")
        group = groups.setdefault(tuple(row[k] for k in ("device", "hidden", "intermediate", "scales")), {})
        cells = group.setdefault((row["experts"], row["tokens"], row["stage"]), {})
        form = row["form"], row["codec"]
        if form in cells:
            sys.exit(f"{path}: measurement {i}: {' '.join(form)} of the same case stands above")
        cells[form] = row
    return groups


def times(row):
    return f"{row['microseconds']:.1f} ({row['raw_equivalent_gb_s'] / 1e3:.2f})"


def moved(row):
    share = "-" if row["of_copy"] is None else f"{row['of_copy']:.2f}"
    return f"{row['bytes_read'] / 1e6:.1f}; {row['ratio']:.4f}; {share}"


def table(group, chosen, cell):
    codecs = list(dict.fromkeys(codec for key in chosen for _, codec in group[key]))
    columns = [(form, codec) for codec in codecs for form in FORMS
               if any((form, codec) in group[key] for key in chosen)]
    columns.sort(key=lambda column: column[0] != "raw")
    heads = [form if form == codec else f"{codec} {form}" for form, codec in columns]
    print(f"| experts | tokens | stage | {' | '.join(heads)} |")
    print("|---" * (3 + len(columns)) + "|")
    for experts, tokens, stage in chosen:
        row = group[experts, tokens, stage]
        cells = [cell(row[column]) if column in row else "" for column in columns]
        print(f"| {experts} | {'' if stage == 'decode' else tokens} | {STAGES[stage]} | {' | '.join(cells)} |")


def numbers(text):
    return {int(n) for n in text.split(",")}


def stages(text):
    chosen = set(text.split(","))
    if not chosen <= STAGES.keys():
        raise ValueError(text)
    return chosen


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", metavar="FILE.json", help="output of host bench kernels --json")
    parser.add_argument("--experts", type=numbers, metavar="N,...", help="these numbers of experts only")
    parser.add_argument("--tokens", type=numbers, metavar="N,...", help="these numbers of tokens only")
    parser.add_argument("--stages", type=stages, metavar="STAGE,...", help=f"of {', '.join(STAGES)}")
    parser.add_argument("--only", choices=("times", "bytes"), help="one kind of table")
    args = parser.parse_args()
    files = [read(path) for path in args.files]
    order, first = list(STAGES), True
    for (device, hidden, intermediate, scales), group in (item for groups in files for item in groups.items()):
        chosen, decoded = [], set()
        for key in sorted(group, key=lambda key: (key[0], key[1], order.index(key[2]))):
            experts, tokens, stage = key
            if (args.experts and experts not in args.experts) or (args.tokens and tokens not in args.tokens) or \
                    (args.stages and stage not in args.stages) or (stage == "decode" and experts in decoded):
                continue
            if stage == "decode":
                decoded.add(experts)
            chosen.append(key)
        if not chosen:
            continue
        print(f"{'' if first else chr(10)}## H {hidden:,}, I {intermediate:,}, {scales} scales: {device}")
        first = False
        if args.only != "bytes":
            print("\nMicroseconds (raw-equivalent TB/s):\n")
            table(group, chosen, times)
        if args.only != "times":
            print("\nMB read; ratio; share of the copy rate:\n")
            table(group, chosen, moved)
    if first:
        sys.exit("none of the measurements is of these experts, tokens and stages")


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:
        sys.stderr.close()
