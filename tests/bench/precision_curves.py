"""Checks that the precision that auto chooses is right: it trains the 11M model in every precision and compares loss and
time.

    python tests/bench/precision_curves.py [--seeds 3] [--threads 2] [--steps 2000] [--rounds 7] [--report]

`make bench-choice` calls it.  The model trains for 2,000 steps, in fp32 with every seed, and in the other precisions with
the first seed.  Then build/bench_step times a step in every precision in turn, because other programs may have run beside
the long runs.  There are two bars.  The validation loss in the precision that auto chooses must be within the spread of
fp32's seeds.  The step in that precision may take at most 1.03 times as long as that of the fastest precision whose loss is
within that spread.  A run that is in out/training is not repeated.  --report trains nothing and uses the runs that exist.
Writes tests/bench/results/choice-CPU-DATE.json.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__))]
import run                                                      # noqa: E402
import training                                                 # noqa: E402

MODEL = ("--model", "d6", "--batch", 1, "--seq", 64)
STEP = ("--model", "11m", "--batch", 4, "--seq", 64, "--steps", 10, "--warmup", 2)
PRECISIONS = ("fp32", "bf16", "fp16")
EVERY, SLOWER = 100, 1.03


def chosen():
    """What auto chooses here: the dtype, and the reason."""
    path = os.path.join(training.FOLDER, "auto.jsonl")
    training.program("--out", training.FOLDER, "--data", training.text(), "--steps", 0, "--precision", "auto", "--metrics", path, *MODEL)
    with open(path) as f:
        begun = next(r for r in map(json.loads, f) if r["event"] == "run")
    return begun["precision"], begun["reason"]


def runs(seeds, steps, threads, train):
    """precision -> the runs there are, with those still missing trained."""
    found = {p: [] for p in PRECISIONS}
    for seed in range(1, seeds + 1):
        for precision in PRECISIONS if seed == 1 else ("fp32",):
            name, path = f"choice-{precision}-{steps}-{seed}", os.path.join(training.FOLDER, f"choice-{precision}-{steps}-{seed}.jsonl")
            done = training.finished(path, steps)
            if done is None and train:
                done = training.train(name, steps, "--precision", precision, "--seed", seed, "--threads", threads, "--log-interval", 1, *MODEL)
                print(f"{name}: {done['loss']:.4f}", flush=True)
            if done is not None:
                with open(path) as f:
                    seconds = sum(r["seconds"] for r in map(json.loads, f) if r["event"] == "step")
                found[precision].append({"recipe": precision, "seed": seed, "steps": steps, "amp.h": done["amp.h"], "loss": round(done["loss"], 4),
                                         "seconds": round(seconds, 1), "every": EVERY,
                                         "curve": [round(x, 4) for s, x in done["steps"].items() if s % EVERY == 0]})
    return found


def step_times(rounds, threads):
    """precision -> the milliseconds of a step, one for each round, in which the precisions take turns."""
    ms = {p: [] for p in PRECISIONS}
    for number in range(rounds):
        turn = number % len(PRECISIONS)
        for precision in PRECISIONS[turn:] + PRECISIONS[:turn]:
            command = [os.path.join(training.ROOT, "build/bench_step"), *map(str, STEP), "--threads", str(threads), "--precision", precision]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=training.ROOT).stdout
            ms[precision].append(json.loads(out.splitlines()[-1])["median_ms"])
    return ms


def bars(found, ms, auto):
    losses = [r["loss"] for r in found["fp32"]]
    spread = max(losses) - min(losses) if len(losses) > 1 else 0
    # One seed's loss beside the others': as far from their mean as they are at most from each other.
    distance = {p: abs(found[p][0]["loss"] - statistics.mean(losses)) / spread for p in PRECISIONS if found[p] and spread}

    def loss():
        if auto not in distance:
            raise run.Skip("its runs have not finished")
        return distance[auto]

    def time():
        near = [p for p in distance if distance[p] <= 1]
        if auto not in ms or not near:
            raise run.Skip("its runs have not finished")
        return max(statistics.median(a / b for a, b in zip(ms[auto], ms[p])) for p in near)
    return [run.verdict(f"{auto}, which auto chooses: distance of its loss from the mean of fp32's seeds over their spread", 1, loss, at_most=True),
            run.verdict(f"{auto}, which auto chooses: time over that of the fastest precision with such a loss", SLOWER, time, at_most=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, value in (("seeds", 3), ("threads", 2), ("steps", 2000), ("rounds", 7)):
        parser.add_argument(f"--{flag}", type=int, default=value)
    parser.add_argument("--report", action="store_true", help="train nothing")
    args = parser.parse_args()
    auto, reason = chosen()
    found = runs(args.seeds, args.steps, args.threads, not args.report)
    ms = step_times(args.rounds, args.threads)
    results = bars(found, ms, auto)
    path = training.write("choice", {"amp.h": "in each run", "text": training.digest(training.text())},
                          command=" ".join(["python tests/bench/precision_curves.py"] + sys.argv[1:]), settings={"threads": args.threads, "model": " ".join(map(str, MODEL)), "step": " ".join(map(str, STEP))},
                          step_ms={p: round(statistics.median(x), 1) for p, x in ms.items()}, auto={"precision": auto, "reason": reason}, bars=results, runs=[r for rows in found.values() for r in rows])
    run.show_bars(results)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
