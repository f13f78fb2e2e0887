"""Rates amp_convert from and to fp64: its time over that of memcpy of the larger side, in caches and in memory.

    python3 tests/bench/convert.py [--rounds 31] [--us 200] [--wait 0]

`make bench-convert` calls it.  It runs bench_convert, whose head says what it measures, and writes
tests/bench/results/convert-CPU-DATE.json.
"""
import argparse
import collections
import datetime
import json
import os
import re
import sys

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__))]
import run                                                      # noqa: E402


def bars(rows):
    out = []
    for where in ("first cache", "second cache", "memory"):
        for to, word in ((False, "from fp64"), (True, "to fp64")):
            of = [row["over_copy"] for row in rows if row["where"] == where and not row["stochastic"] and (row["to"] == "fp64") == to]
            out.append(run.verdict(f"{word}, {where}: time over the copy's, worst", 1.5, lambda: max(of), at_most=True))
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--us", type=int, default=200, help="microseconds of each in a round")
    parser.add_argument("--wait", type=int, default=0, help="seconds to wait for a quiet machine before the run")
    parser.add_argument("--bin", default="build", help="folder with the benchmark")
    parser.add_argument("--out", default="tests/bench/results", help="folder for the JSON file")
    args = parser.parse_args()
    args.threads = 1
    machine = run.Machine(args)
    rows = machine.own("bench_convert", "--rounds", args.rounds, "--us", args.us)[1:]
    rows = [{key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in row.items() if key != "event"} for row in rows]
    verdicts = bars(rows)
    about, now = run.describe_machine(machine, {}), datetime.datetime.now(datetime.timezone.utc)
    path = os.path.join(args.out, f"convert-{run.short_name(about['cpu'])}-{now.strftime('%Y-%m-%d')}.json")
    os.makedirs(os.path.join(run.ROOT, args.out), exist_ok=True)
    whole = collections.OrderedDict(date=now.strftime("%Y-%m-%d %H:%M UTC"), machine=about, versions=run.versions(machine),
                                    commands=list(machine.commands), bars=verdicts, rows=rows)
    with open(os.path.join(run.ROOT, path), "w") as f:          # a row of the table to a line
        f.write(re.sub(r'\{\s+("from"[^}]*?)\s+\}', lambda row: "{" + re.sub(r"\s+", " ", row[1]) + "}",
                       json.dumps(whole, indent=1)) + "\n")
    run.show_bars(verdicts)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
