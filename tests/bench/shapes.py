"""Rates products on one and two threads: fp32 against a BLAS library, bf16 against fp32, and the cost of a call.

    python3 tests/bench/shapes.py [--set small] [--blas libopenblas.so.0] [--rounds 31] [--us 200] [--wait 0]

`make bench-shapes` calls it.  It runs bench_shapes, whose head says what it measures, and writes
tests/bench/results/shapes-CPU-DATE.json, or products-CPU-DATE.json for the large set.  Without the library, its rows are
skipped.  MKL is loaded with --blas libmkl_rt.so.2 (the Python package mkl).
"""
import argparse
import collections
import datetime
import json
import math
import os
import re
import sys

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__))]
import run                                                      # noqa: E402


def bars(head, rows):
    def over(key, pick, wanted=lambda row: True):
        def measure():
            values = [row[key] for row in rows if key in row and wanted(row)]
            if not values:
                raise run.Skip("no BLAS library")
            return pick(values)
        return measure

    def mean(values):
        return math.exp(sum(map(math.log, values)) / len(values))

    def large(row):
        return row["m"] * row["n"] * row["k"] >= 64 ** 3
    threads, out = head["threads"], []

    def bar(text, limit, measure):
        out.append(run.verdict(f"{threads} thread{'s' * (threads > 1)}: {text}", limit, measure, at_most=True))
    limits = {"small": (1.1, 1.5), "large": (1.0, 1 / 0.95)}[head["set"]]
    bar("fp32's time over the library's, geometric mean", limits[0], over("fp32_over_blas", mean))
    bar("fp32's time over the library's, worst", limits[1], over("fp32_over_blas", max))
    if head["set"] == "large":
        bar("fp32's time over the library's in quiet rounds, worst", limits[1], over("fp32_over_blas_quiet", max))
        return out
    for name, key in (("bf16", "bf16_over_fp32"), ("bf16 from bf16", "bf16_from_bf16_over_fp32")):
        bar(f"{name}'s time over fp32's from 64^3 on, worst", 1.03, over(key, max, large))
        bar(f"{name}'s time over fp32's below 64^3, worst", 1.15, over(key, max, lambda row: not large(row)))
    for dtype in ("fp32", "bf16"):
        bar(f"a region and a product of 1 x 1 x 1 in {dtype}, ns", 100, lambda: head[dtype + "_overhead_ns"])
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", default="small", choices=("small", "large"), help="of products")
    parser.add_argument("--blas", default="libopenblas.so.0", help="file of the library")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--us", type=int, default=200, help="microseconds of a contestant in a round")
    parser.add_argument("--wait", type=int, default=0, help="seconds to wait for a quiet machine before each run")
    parser.add_argument("--bin", default="build", help="folder with the benchmark")
    parser.add_argument("--out", default="tests/bench/results", help="folder for the JSON file")
    args = parser.parse_args()
    args.threads = 2
    machine, runs, verdicts = run.Machine(args), [], []
    for threads in (1, 2):
        lines = machine.own("bench_shapes", "--set", args.set, "--blas", args.blas, "--threads", threads,
                            "--rounds", args.rounds, "--us", args.us)
        head, rows = lines[0], lines[1:]
        verdicts += bars(head, rows)
        overhead = {key: round(head[key], 1) for key in ("fp32_overhead_ns", "bf16_overhead_ns")}
        rows = [{key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items()
                 if key != "event"} for row in rows]
        runs.append(collections.OrderedDict(threads=threads, **overhead, rows=rows))
    about, now = run.describe_machine(machine, {}), datetime.datetime.now(datetime.timezone.utc)
    name = {"small": "shapes", "large": "products"}[args.set]
    path = os.path.join(args.out, f"{name}-{run.short_name(about['cpu'])}-{now.strftime('%Y-%m-%d')}.json")
    os.makedirs(os.path.join(run.ROOT, args.out), exist_ok=True)
    whole = collections.OrderedDict(date=now.strftime("%Y-%m-%d %H:%M UTC"), machine=about, versions=run.versions(machine),
                                    commands=list(machine.commands), bars=verdicts, runs=runs)
    with open(os.path.join(run.ROOT, path), "w") as f:          # a row of the table to a line
        f.write(re.sub(r'\{\s+("from"[^}]*?)\s+\}', lambda row: "{" + re.sub(r"\s+", " ", row[1]) + "}",
                       json.dumps(whole, indent=1)) + "\n")
    run.show_bars(verdicts)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
