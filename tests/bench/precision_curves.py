"""What auto chooses, proven by outcome: the 11M model for 2,000 steps in every precision, with its validation loss and its
time.

    python tests/bench/precision_curves.py [--seeds 3] [--threads 2] [--steps 2000] [--report]

`make bench-choice` calls it.  fp32 trains with every seed, the other precisions with the first.  The bars: the validation loss
in the precision that auto chooses lies within the spread of fp32's seeds, and its step takes at most 1.03 times that of the
fastest precision whose loss does.  A step's time is the median over the run's steps.  A run that lies in out/training is not
repeated, and after each run tests/bench/results/choice-CPU-DATE.json is written again: what is stopped goes on with the next
call.  --report writes it from the runs there are.
"""
import argparse
import json
import os
import statistics
import sys

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__))]
import run                                                      # noqa: E402
import training                                                 # noqa: E402

MODEL = ("--model", "d6", "--batch", 2, "--seq", 64)
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
                    seconds = [r["seconds"] for r in map(json.loads, f) if r["event"] == "step"]
                found[precision].append({"recipe": precision, "seed": seed, "steps": steps, "amp.h": done["amp.h"], "loss": round(done["loss"], 4),
                                         "seconds": round(sum(seconds), 1), "step_ms": round(1e3 * statistics.median(seconds), 2), "every": EVERY,
                                         "curve": [round(x, 4) for s, x in done["steps"].items() if s % EVERY == 0]})
    return found


def bars(found, auto):
    spread = [r["loss"] for r in found["fp32"]]
    ms = {p: statistics.median(r["step_ms"] for r in rows) for p, rows in found.items() if rows}
    # One seed's loss beside the others': as far from their mean as they are at most from each other.
    near = {p: abs(found[p][0]["loss"] - statistics.mean(spread)) <= max(spread) - min(spread) for p in ms} if len(spread) > 1 else {}

    def loss():
        if auto not in near:
            raise run.Skip("its runs have not finished")
        return abs(found[auto][0]["loss"] - statistics.mean(spread)) / (max(spread) - min(spread))

    def time():
        fastest = [ms[p] for p in near if near[p]]
        if auto not in ms or not fastest:
            raise run.Skip("its runs have not finished")
        return ms[auto] / min(fastest)
    return [run.verdict(f"{auto}, which auto chooses: distance of its loss from the mean of fp32's seeds over their spread", 1, loss, at_most=True),
            run.verdict(f"{auto}, which auto chooses: time over that of the fastest precision with such a loss", SLOWER, time, at_most=True)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, value in (("seeds", 3), ("threads", 2), ("steps", 2000)):
        parser.add_argument(f"--{flag}", type=int, default=value)
    parser.add_argument("--report", action="store_true", help="train nothing")
    args = parser.parse_args()
    auto, reason = chosen()
    found = runs(args.seeds, args.steps, args.threads, not args.report)
    results = bars(found, auto)
    path = training.write("choice", {"amp.h": "in each run", "text": training.digest(training.text())},
                          command="python tests/bench/precision_curves.py", settings={"threads": args.threads, "model": " ".join(map(str, MODEL))},
                          auto={"precision": auto, "reason": reason}, bars=results, runs=[r for rows in found.values() for r in rows])
    run.show_bars(results)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
