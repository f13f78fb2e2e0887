"""Compares training in fp8 with bf16: the loss curves of every recipe with the same seeds.

    python tests/bench/fp8_curves.py [--seeds 5] [--large-seeds 2] [--threads 1] [--report]

The bar is that the mean final loss of a recipe is within 1% of bf16's.  `make bench-fp8` calls it.  It trains the 842k
model for 600 steps of 16 sequences with all recipes, then the 11M byte model for 300 steps of 4 with bf16, current and MX
scales.  fp8 is used where train_gpt uses it by default, in the inner blocks.  The final loss is that of the validation at
the end.  A run that is in out/training is not repeated, and after each run tests/bench/results/fp8-curves-CPU-DATE.json is
written again.  Therefore an interrupted measurement continues with the next call.  --report writes the file from the runs
that exist.
"""
import argparse
import os
import statistics
import sys

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__))]
import run                                                      # noqa: E402
import training                                                 # noqa: E402

EVERY, WITHIN = 10, 1.01
RECIPES = {"bf16": ("--precision", "bf16"),
           **{s: ("--precision", "fp8", "--fp8-scaling", s) for s in ("current", "delayed", "block", "mx")}}
MODELS = {"842k": {"flags": ("--model", "small", "--batch", 16), "steps": 600, "recipes": tuple(RECIPES)},
          "11m": {"flags": ("--model", "d6", "--batch", 4), "steps": 300, "recipes": ("bf16", "current", "mx")}}


def name(model, recipe, seed):
    return f"fp8-{model}-{recipe}-{seed}"


def flags(model, recipe, seed):
    return (*MODELS[model]["flags"], *RECIPES[recipe], "--seed", seed, "--log-interval", EVERY)


def report(wanted, threads):
    """The runs there are, and a verdict on each recipe over the seeds that it and bf16 have."""
    rows, bars = [], []
    for model, seeds in wanted.items():
        steps, losses = MODELS[model]["steps"], {}
        for recipe in MODELS[model]["recipes"]:
            losses[recipe] = {}
            for seed in range(1, seeds + 1):
                found = training.finished(os.path.join(training.FOLDER, name(model, recipe, seed) + ".jsonl"), steps)
                if found is not None:
                    losses[recipe][seed] = found["loss"]
                    rows.append({"recipe": recipe, "model": model, "seed": seed, "steps": steps, "amp.h": found["amp.h"], "loss": found["loss"],
                                 "every": EVERY, "curve": [round(x, 4) for s, x in found["steps"].items() if s % EVERY == 0]})
        for recipe in MODELS[model]["recipes"][1:]:
            both = sorted(set(losses["bf16"]) & set(losses[recipe]))

            def measure():
                if not both:
                    raise run.Skip("no seed has finished")
                return statistics.mean(losses[recipe][s] for s in both) / statistics.mean(losses["bf16"][s] for s in both)
            what = f"{model}, {recipe}: mean final loss over bf16's, {len(both)} of {seeds} seeds"
            bars.append(run.verdict(what, WITHIN, measure, at_most=True))
    data = training.text()
    return bars, training.write("fp8-curves", {"amp.h": "in each run", "text": training.digest(data)},
                                settings={"threads": threads, "models": {m: " ".join(map(str, MODELS[m]["flags"])) for m in wanted},
                                          "recipes": {r: " ".join(f) for r, f in RECIPES.items()}},
                                bars=bars, runs=rows)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, value in (("seeds", 5), ("large-seeds", 2), ("threads", 1)):
        parser.add_argument(f"--{flag}", type=int, default=value)
    parser.add_argument("--report", action="store_true", help="train nothing")
    args = parser.parse_args()
    wanted = {"842k": args.seeds, "11m": args.large_seeds}
    for model, seeds in wanted.items() if not args.report else ():
        for seed in range(1, seeds + 1):
            for recipe in MODELS[model]["recipes"]:
                run_name = name(model, recipe, seed)
                found = training.train(run_name, MODELS[model]["steps"], "--threads", args.threads, *flags(model, recipe, seed))
                print(f"{run_name}: {found['loss']:.4f}", flush=True)
                report(wanted, args.threads)
    bars, path = report(wanted, args.threads)
    run.show_bars(bars)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
