"""Tests the CUDA backend on the GPU, times it beside PyTorch and writes medians and a verdict per bar as one JSON file.

    python3 tests/gpu/run.py [--bin build/gpu] [--rounds 9] [--ms 20] [--seconds 180] [--only bench]
    python3 tests/gpu/run.py --bin build/rehearsal --rehearse

`make gpu` calls it.  PEER_TORCH names the Python that has PyTorch; without it this one is tried.  The backend is timed
before and after its peers, so that the spread of its own times is known.  --rehearse: programs built for the model GPU,
the smallest sizes, PyTorch on CPU tensors; the file then lies below build/, and no number in it says anything.
"""
import argparse
import collections
import datetime
import hashlib
import json
import os
import platform
import re
import shlex
import signal
import statistics
import subprocess
import sys
import threading
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
# What a kernel must reach of the measured rate of copies: the first word or words of the cases' names.
BARS = [("cast", 0.92), ("unscale", 0.90), ("norm ", 0.90), ("AdamW", 0.90),
        ("layernorm backward", 0.80), ("rmsnorm backward", 0.80), ("residual + layernorm backward", 0.80),
        ("layernorm", 0.90), ("rmsnorm", 0.90), ("residual + layernorm", 0.90), ("softmax", 0.88), ("GELU", 0.90),
        ("SwiGLU", 0.90), ("cross-entropy bf16", 0.85)]
# What attention must reach, in TFLOP/s of 4 T^2 D a head, half of them under a causal mask, 2.5 times as many backward.
# PyTorch's flash and cuDNN backends are timed beside it, in place of eager and compiled.
TFLOPS = {"attention D=64 T=1024": 230, "attention D=64 T=4096": 285, "attention backward D=64 T=1024": 180,
          "attention backward D=64 T=4096": 240}
BACKENDS = ("flash", "cudnn")
SAME = 1.02         # a ratio of two times may be this far from 1 without either being the slower


class Skip(Exception):
    """Why something was not measured."""


def without_paths(text):
    """Error texts may name folders of this machine; the results must not."""
    return re.sub(r"(/[\w.+@-]+)+/", "", text)


class Runner:
    def __init__(self, args):
        self.args, self.commands, self.began = args, [], time.time()
        self.bin = os.path.join(ROOT, args.bin)
        self.env = dict(os.environ, GPU_BIN=args.bin, GPU_MODEL="1" if args.rehearse else "0")

    def say(self, text):
        print(f"[{time.time() - self.began:5.0f} s] {text}", flush=True)

    def lines(self, shown, command, timeout):
        """The JSON lines of a program.  shown: its command line as the results name it."""
        if shown not in self.commands:
            self.commands.append(shown)
        self.say(shown)
        try:
            done = subprocess.run(command, cwd=ROOT, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                  timeout=timeout)
        except (subprocess.TimeoutExpired, OSError) as error:
            raise Skip(without_paths(f"{shown}: {error}"))
        found = [json.loads(text) for text in done.stdout.splitlines() if text.startswith("{")]
        if done.returncode != 0 or not found:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise Skip(without_paths(f"{shown} ended with {done.returncode}: {last}"))
        return found

    def tests(self):
        """The tests on the device, as they print themselves; the counts of the closing line."""
        programs = sorted(name for name in os.listdir(self.bin) if name.startswith("t_") and "." not in name)
        command = ["sh", "tests/run.sh"] + [os.path.join(self.args.bin, name) for name in programs] + ["tests/gpu/sanitize.sh"]
        shown = " ".join(["sh tests/run.sh"] + programs + ["sanitize.sh"])
        self.commands.append(shown)
        self.say(shown)
        last, text, rules = "", [], []
        child = subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                 start_new_session=True)
        watch = threading.Timer(self.args.test_seconds, lambda: os.killpg(child.pid, signal.SIGKILL))
        watch.start()
        for text_line in child.stdout:
            print("    " + text_line, end="", flush=True)
            last = text_line.strip() or last
            if text_line.startswith(("FAIL", "skip")):
                text.append(without_paths(text_line.strip()))
            if text_line.startswith(("confirmed: ", "struck: ")):
                rules.append(text_line.strip())
        child.wait()
        watch.cancel()
        counts = re.match(r"(\d+) passed, (\d+) failed, (\d+) skipped$", last) if child.returncode >= 0 else None
        if counts is None:
            text.append(f"FAIL the tests did not come to their end in {self.args.test_seconds:g} s")
        passed, failed, skipped = (int(n) for n in counts.groups()) if counts else (0, 1, 0)
        return {"programs": programs, "passed": passed, "failed": failed, "skipped": skipped, "not_passed": text,
                "rules_confirmed": sum(rule.startswith("confirmed") for rule in rules),
                "rules_struck": [rule for rule in rules if rule.startswith("struck")]}

    def flags(self):
        a = self.args
        return ["--rounds", str(a.rounds), "--ms", str(a.ms)] + (["--tiny"] if a.rehearse else [])

    def bench(self):
        return self.lines(shlex.join(["bench_gpu"] + self.flags()), [os.path.join(self.bin, "bench_gpu")] + self.flags(), 150)

    def peers(self):
        python = os.environ.get("PEER_TORCH") or sys.executable
        flags = self.flags() + ["--seconds", str(self.args.seconds), "--compile", self.args.compile]
        flags += ["--device", "cpu"] if self.args.rehearse else []
        return self.lines("$PEER_TORCH tests/gpu/peer_gpu.py " + shlex.join(flags),
                          [python, os.path.join(HERE, "peer_gpu.py")] + flags, self.args.seconds + 120)


# ---- What was measured, case by case

def merge(runs, peers):
    """A row per case: the median of the runs, and the peers' times."""
    rows = collections.OrderedDict()
    for run in runs:
        for record in run:
            if record["event"] == "case":
                row = rows.setdefault(record["case"], {"bytes": record["bytes"], "runs_ms": []})
                row["operations"] = record.get("operations", 0)
                row["runs_ms"].append(round(record["ms"], 6))
    for row in rows.values():
        row["ms"] = round(statistics.median(row["runs_ms"]), 6)
        row["spread"] = round(max(row["runs_ms"]) / min(row["runs_ms"]) - 1, 4) if min(row["runs_ms"]) > 0 else None
        row["gb_per_s"] = float(f"{row['bytes'] / row['ms'] * 1e-6:.4g}") if row["ms"] > 0 else None
        operations = row.pop("operations")
        if operations and row["ms"] > 0:
            row["tflop_per_s"] = float(f"{operations / row['ms'] * 1e-9:.4g}")
    for record in peers:
        if record["event"] == "peer" and record["case"] in rows:
            kept = {k: record[k] for k in ("call", "ms", "skipped") if k in record}
            rows[record["case"]].setdefault("peers", collections.OrderedDict())[record["mode"]] = kept
    return rows


def copy_rate(rows):
    """Bytes per second of the faster copy: read and written bytes both count."""
    return max([row["gb_per_s"] for name, row in rows.items() if name.startswith("copy") and row["gb_per_s"]] or [0])


def shares(rows):
    copy = copy_rate(rows)
    for row in rows.values():
        row["share"] = round(row["gb_per_s"] / copy, 4) if copy and row["gb_per_s"] else None
        for peer in row.get("peers", {}).values():
            if peer.get("ms") and row["ms"]:
                peer["ratio"] = round(peer["ms"] / row["ms"], 3)


def verdict(bar, needs, measured, why="", at_least=0.0):
    if measured is None:
        return {"bar": bar, "needs": needs, "measured": None, "verdict": "not measured", "why": why}
    return {"bar": bar, "needs": needs, "measured": measured, "verdict": "PASS" if measured >= at_least else "FAIL"}


def bars(rows, tests, why):
    """Every bar, also of what was not measured: shares of the copy rate, and no peer faster."""
    out = [{"bar": "tests on the GPU", "needs": "none fails", "measured": tests["failed"] if tests else None,
            "verdict": "not measured" if tests is None else "FAIL" if tests["failed"] else "PASS"}]
    for name, row in rows.items():
        share = next((share for start, share in BARS if name.startswith(start)), None)
        if share is not None:
            out.append(verdict(f"{name}: share of the copy rate", f"at least {share:g}", row.get("share"), why, share))
        if name in TFLOPS:
            out.append(verdict(f"{name}: TFLOP/s", f"at least {TFLOPS[name]}", row.get("tflop_per_s"), why, TFLOPS[name]))
        if name.startswith(("copy", "read", "attention")):
            continue
        for mode, peer in row.get("peers", {"eager": {"skipped": why or "no PyTorch"}}).items():
            if peer.get("skipped") != "one kernel as it is":
                out.append(verdict(f"{name}: speed over PyTorch's ({mode})", "at least 1, within 2%", peer.get("ratio"),
                                   peer.get("skipped", ""), 1 / SAME))
    return out


def unsaid(rows):
    """The bars of a rehearsal."""
    return [dict(row, measured=None, verdict="not measured", why="a rehearsal") for row in rows]


# ---- What is printed, and the file

def cell(value, form):
    return "-" if value is None else format(value, form)


def show(rows, verdicts, title):
    """What misses its bar, then one table."""
    for v in verdicts:
        if v["verdict"] != "PASS" and v.get("why") != "a rehearsal":
            print(f"{v['verdict']}: {v['bar']}, {v['needs']}" +
                  (f": {v['measured']:g}" if v["measured"] is not None else f" ({v.get('why') or 'no result'})"))
    print(f"\n{title}\n{'case':32s} {'ms':>9s} {'GB/s':>7s} {'of copy':>8s} {'TFLOP/s':>8s} {'eager':>7s} {'compiled':>9s}  bars")
    for name, row in rows.items():
        peers = row.get("peers", {})
        ratios = [cell(peers.get(mode, {}).get("ratio"), ".2f") + ("x" if peers.get(mode, {}).get("ratio") else "")
                  for mode in (BACKENDS if name.startswith("attention") else ("eager", "compile"))]
        own = [v["verdict"] for v in verdicts if v["bar"].startswith(name + ":")]
        worst = next((word for word in ("FAIL", "not measured", "PASS") if word in own), "")
        print(f"{name:32s} {cell(row['ms'], '.4f'):>9s} {cell(row['gb_per_s'], '.4g'):>7s} {cell(row['share'], '.1%'):>8s} "
              f"{cell(row.get('tflop_per_s'), '.4g'):>8s} {ratios[0]:>7s} {ratios[1]:>9s}  {worst}")
    met = sum(v["verdict"] == "PASS" for v in verdicts)
    rehearsal = any(v.get("why") == "a rehearsal" for v in verdicts)
    print("eager, compiled (attention: flash, cuDNN): how many times as fast as PyTorch's.  " +
          ("A rehearsal measures no bar." if rehearsal else f"{met} of {len(verdicts)} bars are met."))


def versions(device, peer):
    out = collections.OrderedDict()
    for name in ("amp.h", "amp_cuda.cu"):
        with open(os.path.join(ROOT, name), "rb") as f:
            out[name] = "sha256 " + hashlib.sha256(f.read()).hexdigest()[:16]
    out["nvcc"] = subprocess.run(["sh", "tests/gpu/find.sh", "release"], cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.strip()
    out["driver"], out["runtime"] = device.get("driver"), device.get("runtime")
    out["torch"], out["python"] = peer.get("torch"), platform.python_version()
    return out


def short_name(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-") or "gpu"


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bin", default="build/gpu", help="folder of the programs, from the project's root")
    parser.add_argument("--rehearse", action="store_true", help="they are built for the model GPU")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ms", type=float, default=20, help="milliseconds of one round")
    parser.add_argument("--seconds", type=float, default=180, help="PyTorch's; what they leave no time for is skipped")
    parser.add_argument("--test-seconds", type=float, default=180, help="after which the tests are ended, and have failed")
    parser.add_argument("--compile", default="all", help="which cases PyTorch also compiles: those whose name holds it")
    parser.add_argument("--only", default="tests,bench,peers")
    args = parser.parse_args()
    if args.rehearse:
        args.rounds, args.compile = min(args.rounds, 2), "residual +" if args.compile == "all" else args.compile
    return args


def measure(runner):
    """The tests' counts or None, the runs of our programs, PyTorch's lines, and what was skipped."""
    parts, runs, peers, why = runner.args.only.split(","), [], [], []
    tests = runner.tests() if "tests" in parts else None

    def attempt(part, work):
        try:
            return work() if part in parts else []
        except Skip as skip:
            why.append(str(skip))
            runner.say(f"skipped: {skip}")
            return []
    runs.append(attempt("bench", runner.bench))
    peers = attempt("peers", runner.peers)
    runs.append(attempt("bench", runner.bench))
    return tests, runs, peers, "; ".join(why)


def main():
    args = arguments()
    runner, now = Runner(args), datetime.datetime.now(datetime.timezone.utc)
    tests, runs, peers, why = measure(runner)
    rows = merge(runs, peers)
    shares(rows)
    device = next((r for run in runs for r in run if r["event"] == "device"), {"name": "no result"})
    rated = bars(rows, tests, why)
    if args.rehearse:
        device["name"], rated = "model", unsaid(rated)
    whole = collections.OrderedDict(
        date=now.strftime("%Y-%m-%d %H:%M UTC"), device={k: v for k, v in device.items() if k != "event"},
        versions=versions(device, next((r for r in peers if r["event"] == "versions"), {})),
        settings={"rounds": args.rounds, "ms": args.ms}, commands=runner.commands, seconds=round(time.time() - runner.began),
        copy_gb_per_s=copy_rate(rows), bars=rated, tests=tests, cases=rows)
    show(rows, rated, f"{device['name']}, {now.strftime('%Y-%m-%d')}, copies {copy_rate(rows):.4g} GB/s"
         + ("; a rehearsal, no number says anything" if args.rehearse else ""))
    if not rows:
        return print("nothing was timed, nothing is written") or 1
    folder = "build/rehearsal" if args.rehearse else "tests/bench/results"
    path = os.path.join(folder, f"gpu-{short_name(device['name'])}-{now.strftime('%Y-%m-%d')}.json")
    os.makedirs(os.path.join(ROOT, folder), exist_ok=True)
    with open(os.path.join(ROOT, path), "w") as f:
        json.dump(whole, f, indent=1)
        f.write("\n")
    print(f"wrote {path}, {whole['seconds']} s in all")
    return 1 if tests and tests["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
