"""Compares the error and speed of long sums and products in fp32 with those of another commit and of PyTorch.

    python tests/bench/sums.py --base COMMIT [--rounds 3] [--repeats 100] [--path N] [--core N]

It builds one program of bench_sums.c with this amp.h and with that commit's.  The program calls the two in turn, some 50 us
of each, in one thread and on the same buffers, so that a busy machine slows both alike.  PyTorch runs on the same numbers
between the rounds.  Errors are in units of 2^-24 relative to an fp64 result.  `speed` is the median of the ratios base /
now of such neighbours, and `speed_of_least` is the ratio of the least times.  Each is the median over the rounds.
`seconds` are medians, and `least` are the least times.  Writes tests/bench/results/sums-CPU-DATE.json.
"""
import argparse
import datetime
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn.functional as F

sys.path[:0] = [os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "torch", "oracle"), os.path.dirname(os.path.abspath(__file__))]
import common                                                   # noqa: E402
import run                                                      # noqa: E402

ROOT = run.ROOT
FLAGS = ["-std=c99", "-D_GNU_SOURCE", "-O2", "-w", "-fopenmp"]


def build(base, work):
    beside, out = os.path.join(work, "beside.o"), os.path.join(work, "pair")
    subprocess.run(["gcc", *FLAGS, "-DSUMS_BESIDE", "-c", "-o", beside, os.path.join(base, "tests/bench/bench_sums.c")], check=True)
    subprocess.run(["gcc", *FLAGS, "-DSUMS_PAIR", "-o", out, os.path.join(ROOT, "tests/bench/bench_sums.c"), beside, "-lm", "-lpthread"],
                   check=True)
    return out


def measure(program, path, repeats):
    command = [program, "--repeats", str(repeats)] + (["--path", str(path)] if path else [])
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {(r["case"], r["rows"], r["cols"]): r for r in map(json.loads, out.splitlines())}


def call(case, rows, cols):
    """PyTorch's way of a case: function(dtype), on the numbers of bench_sums.c; None where there is none."""
    shape = {"attention_keys": (64, cols), "attention_queries": (2 * rows, cols)}.get(case, (rows, cols))
    x = torch.from_numpy(common.uniform(1, 0, shape))
    if case in ("columns", "columns_bf16"):
        x = x.bfloat16() if case == "columns_bf16" else x
        return lambda dtype: x.sum(0, dtype=dtype) if dtype == torch.float32 else x.to(dtype).sum(0)
    if case in ("positions", "table"):
        dy, ids = x.reshape(-1, cols // 2), torch.arange(2 * rows) % 2
        leaf = {d: torch.zeros(2, cols // 2, dtype=d, requires_grad=True) for d in (torch.float32, torch.float64)}

        def gradient(dtype):
            p = leaf[dtype]
            y = F.embedding(ids, p) if case == "table" else p.expand(rows, 2, cols // 2)
            return torch.autograd.grad(y, p, dy.to(dtype).reshape(y.shape))[0].reshape(-1)
        return gradient
    if case.startswith("softmax"):
        a, w = x.reshape(cols, rows), torch.from_numpy(common.uniform(2, 0, (cols, rows)))
        if case == "softmax":
            return lambda dtype: torch.softmax(a.to(dtype), 1)
        y = {d: torch.softmax(a.to(d), 1) for d in (torch.float32, torch.float64)}
        return lambda dtype: torch._softmax_backward_data(w.to(dtype), y[dtype], 1, dtype)
    if case == "row_times_matrix":
        w = torch.from_numpy(common.uniform(2, 0, (1, rows)))
        return lambda dtype: w.to(dtype) @ x.to(dtype)
    if case == "matrix_times_column":
        a, w = x.reshape(cols, rows), torch.from_numpy(common.uniform(2, 0, (rows, 1)))
        return lambda dtype: a.to(dtype) @ w.to(dtype)
    if case.startswith("product"):
        a, b = x, torch.from_numpy(common.uniform(2, 0, (rows, cols)))
        a = a.T if case == "product_tn" else a.reshape(cols, rows)
        b = b.reshape(cols, rows).T if case == "product_nt" else b
        return lambda dtype: a.to(dtype) @ b.to(dtype)
    return None                                                 # norm and attention: PyTorch's call does more, or less


def torch_measure(keys):
    """key -> (error, seconds)"""
    found = {}
    for key in keys:
        function = call(*key)
        if function is None:
            continue
        got, exact = function(torch.float32), function(torch.float64)
        error = float((got.double() - exact).norm() / exact.norm()) * 2 ** 24
        calls, least = 1, 1e30
        for repeat in range(5):
            start = time.thread_time()
            for _ in range(calls):
                function(torch.float32)
            one = (time.thread_time() - start) / calls
            least, calls = min(least, one), max(1, int(0.002 / max(one, 1e-7))) if repeat == 0 else calls
        found[key] = (error, least)
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=100, help="timed neighbours of each case in a round")
    parser.add_argument("--core", type=int, default=-1, help="the core to stay on; -1: any")
    parser.add_argument("--path", type=int, default=0, help="amp_cpu_path; 0: the best")
    parser.add_argument("--machine", default="", help="short name of the CPU in the file's name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.core >= 0:
        os.sched_setaffinity(0, {args.core})
    now, peer = [], []
    with open(os.path.join(ROOT, "amp.h"), "rb") as f:
        digest = hashlib.sha256(f.read()).hexdigest()[:16]
    with tempfile.TemporaryDirectory() as work:
        tree = os.path.join(work, "base")
        os.mkdir(tree)
        archive = subprocess.run(["git", "archive", args.base], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
        subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
        for name in ("bench_sums.c", "bench.h"):
            with open(os.path.join(ROOT, "tests/bench", name)) as f, open(os.path.join(tree, "tests/bench", name), "w") as to:
                to.write(f.read())
        program = build(tree, work)
        for i in range(args.rounds):
            now.append(measure(program, args.path, args.repeats))
            peer.append(torch_measure(now[0]))
            print(f"round {i + 1} of {args.rounds}", flush=True)
    rows = []
    for key, r in now[0].items():
        row = {"case": key[0], "rows": key[1], "cols": key[2], "error": r["error"], "error_base": r["error_base"]}
        if key in peer[0]:
            row["error_torch"] = round(peer[0][key][0], 3)
        if "seconds" in r:
            for name in ("seconds", "seconds_base", "speed", "speed_of_least"):
                row[name] = statistics.median(x[key][name] for x in now)
            for name in ("least", "least_base"):
                row[name] = min(x[key][name] for x in now)
            if key in peer[0]:
                row["seconds_torch"] = float(f"{statistics.median(p[key][1] for p in peer):.4g}")
        rows.append(row)
        print(json.dumps(row))
    time_now = datetime.datetime.now(datetime.timezone.utc)
    base_commit = subprocess.run(["git", "rev-parse", "--short", args.base], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()
    cpu = run.cpu_name()
    whole = {"date": time_now.strftime("%Y-%m-%d %H:%M UTC"), "machine": {"cpu": cpu, "cores": os.cpu_count(), "path": args.path or "best"},
             "versions": {"amp.h": f"sha256 {digest}", "base": base_commit, "torch": torch.__version__,
                          "torch_cpu": torch.backends.cpu.get_cpu_capability()},
             "settings": {"threads": 1, "rounds": args.rounds, "repeats": args.repeats},
             "commands": [f"python tests/bench/sums.py --base {base_commit} --rounds {args.rounds} --repeats {args.repeats}"
                          + (f" --path {args.path}" if args.path else "") + (f" --core {args.core}" if args.core >= 0 else "")],
             "sums": rows}
    name = f"sums-{args.machine or run.short_name(cpu)}{'-path' + str(args.path) if args.path else ''}-{time_now.strftime('%Y-%m-%d')}.json"
    path = os.path.join(ROOT, "tests/bench/results", name)
    with open(path, "w") as f:
        json.dump(whole, f, indent=1)
        f.write("\n")
    print(f"wrote {os.path.relpath(path, ROOT)}")


if __name__ == "__main__":
    sys.exit(main())
