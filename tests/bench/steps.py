"""Compares the time of train_gpt's step with that at another commit, in alternating runs, as medians of ratios.

    python3 tests/bench/steps.py COMMIT [--rounds 7] [--models 11M,124M] [--precisions fp32,bf16]

It builds both with -O2.  The step of a run is (the CPU time of a run of four steps - that of a run of one step) / 3, over
all threads together.  CPU time is used because neighbours change it less.  Writes tests/bench/results/steps-CPU-DATE.json.
"""
import argparse
import collections
import datetime
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__))]
import run                                                      # noqa: E402

MODELS = {"11M": "--layers 6 --heads 6 --channels 384 --seq 256 --batch 4", "124M": "--layers 12 --heads 12 --channels 768 --seq 64 --batch 1 --vocab 50304"}
FLAGS = "--threads 1 --workers 0 --sample 0 --eval-batches 1 --save none".split()


def build(folder, cc, out):
    subprocess.run([cc, "-std=c99", "-O2", "-w", "-I.", "examples/train_gpt.c", "-o", out, "-lm", "-lpthread"], check=True, cwd=folder)
    known = subprocess.run([out, "--help"], capture_output=True, text=True, check=True).stdout
    return [out] + (["--compare", "0"] if "--compare" in known else [])


def cpu(command, folder):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def step(program, flags, folder):
    return (cpu(program + flags + ["--steps", "4"], folder) - cpu(program + flags + ["--steps", "1"], folder)) / 3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", default="11M,124M")
    parser.add_argument("--precisions", default="fp32,bf16")
    parser.add_argument("--cc", default="gcc")
    parser.add_argument("--out", default="tests/bench/results")
    args = parser.parse_args()
    args.threads, args.wait, args.bin = 1, 0, "build"
    machine, rows = run.Machine(args), []
    with tempfile.TemporaryDirectory() as work:
        subprocess.run(f"git archive {args.commit} | tar -x -C {work}", shell=True, check=True, cwd=run.ROOT)
        now, then = build(run.ROOT, args.cc, f"{work}/now"), build(work, args.cc, f"{work}/then")
        subprocess.run(f"head -c 200000 {run.ROOT}/README.md {run.ROOT}/amp.h | grep -v '^==>' > {work}/text", shell=True, check=True)
        for model in args.models.split(","):
            for precision in args.precisions.split(","):
                flags = MODELS[model].split() + FLAGS + ["--precision", precision, "--data", f"{work}/text", "--out", f"{work}/out"]
                pairs = [(step(now, flags, work), step(then, flags, work)) for _ in range(args.rounds)]
                rows.append(collections.OrderedDict(model=model, precision=precision, ms=round(1e3 * statistics.median(a for a, _ in pairs), 1),
                            ms_then=round(1e3 * statistics.median(b for _, b in pairs), 1),
                            speed_over_then=round(statistics.median(b / a for a, b in pairs), 3)))
                print(json.dumps(rows[-1]), flush=True)
    about, date = run.describe_machine(machine, {}), datetime.datetime.now(datetime.timezone.utc)
    about.pop("used_by_others")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=run.ROOT).stdout.strip()
    whole = collections.OrderedDict(date=date.strftime("%Y-%m-%d %H:%M UTC"), machine=about, command="python3 tests/bench/steps.py " + args.commit,
                                    commit=commit, rounds=args.rounds, flags=" ".join(FLAGS), models=MODELS, rows=rows)
    path = os.path.join(args.out, f"steps-{run.short_name(about['cpu'])}-{date.strftime('%Y-%m-%d')}.json")
    with open(os.path.join(run.ROOT, path), "w") as f:
        f.write(re.sub(r'\{\s+("model"[^}]*?)\s+\}', lambda row: "{" + re.sub(r"\s+", " ", row[1]) + "}", json.dumps(whole, indent=1)) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
