"""Compares AdamW with moments in 8 bits with fp32 and bf16 moments, and with bitsandbytes' 8-bit AdamW on the CPU.

    python tests/bench/moments.py [--rounds 5] [--steps 1200] [--batch 2] [--seeds 5] [--eight 5] [--threads 1]

It measures the time and memory of a step, and compares the loss of the 842k model with five fp32 seeds.  It needs
build/bench_moments and build/train_gpt (make bench-moments).  The programs take turns, so that a busy machine slows all
alike, and the figures are medians over the rounds.  Losses are those of the validation at the end.  A run that is in
out/training is not repeated.  With --seeds 0, no losses are measured.  Writes tests/bench/results/moments-CPU-DATE.json.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time

import bitsandbytes
import torch

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__))]
import training                                                 # noqa: E402

ROOT = training.ROOT
N, REPEATS = 4194304, 15


def peers():
    """name -> (optimizer, bytes of its moments per parameter)"""
    made = {}
    for name, make in (("PyTorch, fused", lambda p: torch.optim.AdamW([p], lr=1e-3, weight_decay=0.1, fused=True)),
                       ("bitsandbytes, 8bit", lambda p: bitsandbytes.optim.AdamW8bit([p], lr=1e-3, weight_decay=0.1))):
        p = torch.nn.Parameter(torch.rand(N) - 0.5)
        p.grad = 0.01 * (torch.rand(N) - 0.5)
        optimizer = make(p)
        for _ in range(2):
            optimizer.step()
        kept = [t for t in optimizer.state[p].values() if torch.is_tensor(t) and t.numel() > 256]
        made[name] = (optimizer, sum(t.numel() * t.element_size() for t in kept) / N)
    return made


def times(rounds, threads):
    torch.set_num_threads(threads)
    others, found = peers(), {}
    for _ in range(rounds):
        out = subprocess.run([os.path.join(ROOT, "build/bench_moments"), "--n", str(N), "--repeats", str(REPEATS), "--threads", str(threads)],
                             check=True, stdout=subprocess.PIPE, text=True).stdout
        for row in map(json.loads, out.splitlines()):
            found.setdefault(f"amp.h, {row['moments']}", []).append((row["ms"], row["least_ms"], row["moment_bytes"]))
        for name, (optimizer, size) in others.items():
            took = []
            for _ in range(REPEATS):
                start = time.perf_counter()
                optimizer.step()
                took.append(1e3 * (time.perf_counter() - start))
            found.setdefault(name, []).append((statistics.median(took), min(took), size))
    return [{"who": name, "ms": round(statistics.median(r[0] for r in rows), 3), "least_ms": round(min(r[1] for r in rows), 3),
             "moment_bytes": round(rows[0][2], 5)} for name, rows in found.items()]


def final_loss(moments, seed, args):
    return training.train(f"moments-{moments}-{seed}-{args.steps}-{args.batch}", args.steps, "--threads", args.threads, "--batch", args.batch,
                          "--precision", "fp32", "--seed", seed, "--moments", moments)["loss"]


def verdict(losses, args):
    """Whether the mean of the 8-bit runs lies within the spread of the fp32 ones; None: nothing was trained."""
    if not losses["fp32"] or not losses["8bit"]:
        return None
    low, high, mean = min(losses["fp32"]), max(losses["fp32"]), statistics.mean(losses["8bit"])
    print(f"8-bit moments: {mean:.4f}, fp32: {low:.4f} to {high:.4f}: {'inside' if low <= mean <= high else 'OUTSIDE'}")
    return {"model": "842k", "steps": args.steps, "batch": args.batch, "losses": losses, "fp32_spread": [low, high],
            "8bit_mean": mean, "inside": low <= mean <= high}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for flag, value in (("rounds", 5), ("steps", 1200), ("batch", 2), ("seeds", 5), ("eight", 5), ("threads", 1)):
        parser.add_argument(f"--{flag}", type=int, default=value)
    args = parser.parse_args()
    steps = times(args.rounds, args.threads)
    for row in steps:
        print(json.dumps(row))
    losses = {"fp32": [], "8bit": []}
    for seed in range(1, max(args.seeds, args.eight) + 1):
        for moments, count in (("fp32", args.seeds), ("8bit", args.eight)):
            if seed <= count:
                losses[moments].append(final_loss(moments, seed, args))
                print(moments, seed, losses[moments][-1])
    name = training.write("moments", {"amp.h": training.digest(os.path.join(ROOT, "amp.h")), "torch": torch.__version__,
                                      "bitsandbytes": bitsandbytes.__version__, "python": platform.python_version()},
                          command="python tests/bench/moments.py " + " ".join(f"--{k} {v}" for k, v in vars(args).items()),
                          n=N, adamw_step=steps, training=verdict(losses, args))
    print(f"wrote {name}")
