"""Tests the CUDA backend on the GPU, times it beside PyTorch and writes medians and a verdict per bar as one JSON file.

    python3 tests/gpu/run.py [--parts link,rules,attention,kernels] [--bin build/gpu] [--rounds 9] [--ms 20]
    python3 tests/gpu/run.py --bin build/rehearsal --rehearse

`make gpu` calls it.  Parts, in the order that helps most on a GPU that is there for minutes: whether the backend links and
opens the GPU (link), fragments and cuBLASLt's rules (rules), attention's tests (attention), those of fp8 (fp8), timings
(kernels), whole training steps with autotuning (step), all other tests and compute-sanitizer (tests).  Each prints its verdict and saves the
file when it ends, so that a run that is cut off keeps what it has.  Each can be run alone; a day's parts on one GPU share
a file, in which a part replaces what it wrote before.  PEER_TORCH names the Python that has
PyTorch; without it this one is tried.  The backend is timed before and after its peers, so that the spread of its own
times is known.  One deadline holds for everything, building included: what it leaves no time for is said to be not
measured.  --rehearse: programs built for the model GPU, the smallest sizes, PyTorch on CPU tensors; the file then lies
below build/, and no number in it says anything.
"""
import argparse
import collections
import concurrent.futures
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
import tempfile
import threading
import time

import step

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PARTS = ("link", "rules", "attention", "fp8", "kernels", "step", "tests")
PROGRAMS = {"rules": ["t_models"], "attention": ["t_cuda_attention"], "fp8": ["t_cuda_fp8"]}     # tests: all others
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
# Seconds: of everything; what a part may take of them where others come after it, and what is left to compute-sanitizer.
WHOLE, SANITIZERS = 575, 45
SHARES = {"link": 30, "rules": 75, "attention": 75, "fp8": 45, "kernels": 190, "step": 200, "tests": WHOLE}
AT_ONCE = max(3, (os.cpu_count() or 1) // 2)    # test programs: they compute on the CPU what is right


def without_paths(text):
    """Error texts may name folders of this machine; the results must not."""
    return re.sub(r"(?<![\w.])(/[\w.+@-]+)+/", "", text)


class Runner:
    def __init__(self, args):
        self.args, self.commands, self.why, self.began = args, [], [], args.began or time.time()
        self.last = self.end = self.began + (args.seconds or WHOLE)
        self.keep = lambda rows: None           # saves what a part has so far
        self.root, self.bin = ROOT, os.path.join(ROOT, args.bin)
        self.python = os.environ.get("PEER_TORCH") or sys.executable
        self.env = dict(os.environ, GPU_BIN=args.bin, GPU_MODEL="1" if args.rehearse else "0",
                        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")     # its largest steps leave no room for gaps

    def left(self):
        return self.end - time.time()

    def begin(self, part):
        """Its share of the time, or all that is left where nothing comes after it."""
        rest = PARTS[PARTS.index(part) + 1:]
        alone = self.args.rehearse or not any(other in self.args.parts for other in rest)
        self.end = self.last if alone else min(self.last, time.time() + SHARES[part])

    def say(self, text):
        print(f"[{time.time() - self.began:5.0f} s] {text}", flush=True)

    def skip(self, why):
        """Says and keeps why something was not measured, or not wholly."""
        self.why.append(without_paths(why))
        self.say(f"skipped: {self.why[-1]}")

    def shown(self, command):
        if command not in self.commands:
            self.commands.append(command)
        self.say(command)

    def wait(self, child, seconds):
        """The exit status, or None where the time was not enough; then nothing of the program is left."""
        try:
            return child.wait(max(1, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def lines(self, shown, command, seconds, meanwhile=None):
        """The JSON lines that a program printed, also of one that did not come to its end.  shown: its command line as
        the results name it.  meanwhile: called with each line as it comes."""
        self.shown(shown)
        found = []

        def read(stream):
            for text in stream:
                if text.startswith("{") and text.endswith("}\n"):
                    found.append(json.loads(text))
                    if meanwhile:
                        meanwhile(found[-1])
        with tempfile.TemporaryFile("w+") as errors:
            try:
                child = subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=subprocess.PIPE, stderr=errors, text=True,
                                         start_new_session=True)
            except OSError as error:
                return self.skip(f"{shown}: {error}") or found
            reader = threading.Thread(target=read, args=(child.stdout,), daemon=True)
            reader.start()
            status = self.wait(child, seconds)
            reader.join(5)
            errors.seek(0)
            last = ([text.strip() for text in errors if text.strip()] or ["no message"])[-1]
        failed = [f"{record['case']}: {record['why']}" for record in found if record["event"] == "failed"]
        if status is None:
            self.skip(f"{shown}: stopped after {max(1, seconds):.0f} s")
        elif status != 0 or not found:
            self.skip(f"{shown} ended with {status}: {'; '.join(failed) or last}")
        return found

    # ---- The tests

    def program(self, program, seconds):
        """Runs a test program and shows what it printed: the counts of its closing line, and the lines."""
        with tempfile.TemporaryFile("w+") as out:
            child = subprocess.Popen(["sh", "tests/run.sh", program], cwd=ROOT, env=self.env, stdout=out,
                                     stderr=subprocess.STDOUT, start_new_session=True)
            status = self.wait(child, seconds)
            out.seek(0)
            lines = out.read().splitlines()
        if status is None:
            lines += [f"FAIL {os.path.basename(program)}: did not come to its end in {seconds:.0f} s",
                      "0 passed, 1 failed, 0 skipped"]
        self.say("\n    ".join(lines[:-1]))
        counts = [int(n) for n in re.findall(r"(\d+) (?:passed|failed|skipped)", lines[-1])]
        return counts, [without_paths(text.strip()) for text in lines]

    def programs(self, programs, seconds):
        """Runs several at a time: the sums of their counts, what failed or was skipped, and cuBLASLt's and the tensor cores'
        rules that were confirmed or struck."""
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            end = time.time() + seconds
            found = list(pool.map(lambda program: self.program(program, end - time.time()), programs))
        lines = [text for _, text in found for text in text]
        return ([sum(counts[i] for counts, _ in found) for i in range(3)],
                [text for text in lines if text.startswith(("FAIL", "skip"))],
                [text for text in lines if text.startswith(("confirmed: ", "struck: "))])

    def tests(self, part):
        """The programs of a part; with the last of them compute-sanitizer, in a time of its own, which ends without a failure."""
        early = [name for names in PROGRAMS.values() for name in names]
        names = PROGRAMS.get(part) or sorted(name for name in os.listdir(self.bin) if name.startswith("t_") and "." not in name
                                             and name not in early)
        self.shown(" ".join(["sh tests/run.sh"] + names))
        counts, text, rules = self.programs([os.path.join(self.args.bin, name) for name in names],
                                            self.left() - (SANITIZERS if part == "tests" else 0))
        if part == "tests":
            self.env["SANITIZE_SECONDS"] = str(int(max(0, min(SANITIZERS, self.left() - 5))))
            self.shown("sh tests/run.sh sanitize.sh")
            more, found, _ = self.programs(["tests/gpu/sanitize.sh"], self.left() + 15)
            counts, text, names = [a + b for a, b in zip(counts, more)], text + found, names + ["sanitize.sh"]
        out = {"programs": names, "passed": counts[0], "failed": counts[1], "skipped": counts[2], "not_passed": text}
        if part == "rules":
            out.update(rules_confirmed=sum(rule.startswith("confirmed") for rule in rules),
                       rules_struck=[rule for rule in rules if rule.startswith("struck")])
        return out

    # ---- The kernels

    def flags(self):
        a = self.args
        return ["--rounds", str(a.rounds), "--ms", str(a.ms)] + (["--tiny"] if a.rehearse else []) + (
            ["--only", a.only] if a.only else [])

    def bench(self, meanwhile=None):
        return self.lines(shlex.join(["bench_gpu"] + self.flags()), [os.path.join(self.bin, "bench_gpu")] + self.flags(),
                          self.left(), meanwhile)

    def peers(self, seconds):
        flags = self.flags() + ["--seconds", f"{seconds:.0f}", "--compile", self.args.compile]
        flags += ["--device", "cpu"] if self.args.rehearse else []
        return self.lines("$PEER_TORCH tests/gpu/peer_gpu.py " + shlex.join(flags),
                          [self.python, os.path.join(HERE, "peer_gpu.py")] + flags, seconds + 15)

    def kernels(self):
        """Our times, PyTorch's in what time is left, our times again."""
        began, so_far = time.time(), []

        def meanwhile(record):
            so_far.append(record)
            self.keep([so_far])
        first = self.bench(meanwhile)
        took = 1.1 * (time.time() - began)
        peers = self.peers(max(1, self.left() - took - 20))
        second = []
        if self.left() > took or self.args.rehearse:
            second = self.bench()
        else:
            self.skip("bench_gpu a second time: no time left")
        return [first, second], peers


# ---- What was measured, case by case

def merge(runs, peers):
    """A row per case: the median of the runs, and the peers' times."""
    rows = collections.OrderedDict()
    for run in runs:
        for record in run:
            if record["event"] == "case":
                row = rows.setdefault(record["case"], {"bytes": record["bytes"], "runs_ms": []})
                row["operations"], row["host_us"] = record.get("operations", 0), record["host_us"]
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


def test_bars(part, tests):
    """Of the parts that are tests; link counts as one."""
    failed = tests["failed"] if tests else None
    what = {"link": "the backend links and opens the GPU", "rules": "fragments and rules", "attention": "attention's tests",
            "fp8": "fp8: operands' bits, and products beside the CPU's", "tests": "all other tests"}
    return [{"bar": what[part], "needs": "none fails", "measured": failed,
             "verdict": "not measured" if tests is None else "FAIL" if failed else "PASS"}]


def bars(rows, why):
    """Every bar of the kernels, also of what was not measured: shares of the copy rate, and no peer faster."""
    out = []
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


def show(whole, parts):
    """What misses its bar, then the tables, of the parts that were run."""
    verdicts = [v for v in whole["bars"] if v["part"] in parts]
    rehearsal = any(v.get("why") == "a rehearsal" for v in verdicts)
    for v in verdicts:
        if v["verdict"] != "PASS" and v.get("why") != "a rehearsal":
            print(f"{v['verdict']}: {v['bar']}, {v['needs']}" +
                  (f": {v['measured']:g}" if v["measured"] is not None else f" ({v.get('why') or 'no result'})"))
    print(f"\n{whole['device']['name']}, {whole['date']}" + ("; a rehearsal, no number says anything" if rehearsal else ""))
    if "kernels" in parts and whole["cases"]:
        show_kernels(whole["cases"], verdicts, whole["copy_gb_per_s"])
    if "step" in parts and whole["step"]:
        step.show(whole["step"])
    met = sum(v["verdict"] == "PASS" for v in verdicts)
    print("A rehearsal measures no bar." if rehearsal else f"{met} of {len(verdicts)} bars are met.")


def show_kernels(rows, verdicts, copy):
    print(f"\ncopies {copy:.4g} GB/s\n{'case':38s} {'ms':>9s} {'GB/s':>7s} {'of copy':>8s} {'TFLOP/s':>8s} {'eager':>7s} "
          f"{'compiled':>9s}  bars")
    for name, row in rows.items():
        peers = row.get("peers", {})
        ratios = [cell(peers.get(mode, {}).get("ratio"), ".2f") + ("x" if peers.get(mode, {}).get("ratio") else "")
                  for mode in (BACKENDS if name.startswith("attention") else ("eager", "compile"))]
        own = [v["verdict"] for v in verdicts if v["bar"].startswith(name + ":")]
        worst = next((word for word in ("FAIL", "not measured", "PASS") if word in own), "")
        print(f"{name:38s} {cell(row['ms'], '.4f'):>9s} {cell(row['gb_per_s'], '.4g'):>7s} {cell(row['share'], '.1%'):>8s} "
              f"{cell(row.get('tflop_per_s'), '.4g'):>8s} {ratios[0]:>7s} {ratios[1]:>9s}  {worst}")
    print("eager, compiled (attention: flash, cuDNN): how many times as fast as PyTorch's.")


def versions(device, torch):
    out = collections.OrderedDict()
    for name in ("amp.h", "amp_cuda.cu"):
        with open(os.path.join(ROOT, name), "rb") as f:
            out[name] = "sha256 " + hashlib.sha256(f.read()).hexdigest()[:16]
    nvcc = subprocess.run(["sh", "tests/gpu/find.sh", "release"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    out["nvcc"] = nvcc.stdout.strip()
    out["driver"], out["runtime"] = device.get("driver"), device.get("runtime")
    out["torch"], out["python"] = torch, platform.python_version()
    return out


def short_name(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-") or "gpu"


def describe(runner):
    """The device, from bench_gpu, which every part builds."""
    found = runner.lines("bench_gpu --describe", [os.path.join(runner.bin, "bench_gpu"), "--describe"], 60)
    device = next((r for r in found if r["event"] == "device"), {"name": "no result"})
    return dict({k: v for k, v in device.items() if k not in ("event", "rounds", "ms")},
                **({"name": "model"} if runner.args.rehearse else {}))


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help="some of " + ", ".join(PARTS))
    parser.add_argument("--bin", default="build/gpu", help="folder of the programs, from the project's root")
    parser.add_argument("--rehearse", action="store_true", help="they are built for the model GPU")
    parser.add_argument("--began", type=float, default=0, help="when building began, in seconds since 1970")
    parser.add_argument("--seconds", type=float, default=0, help=f"for everything; default {WHOLE}")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ms", type=float, default=20, help="milliseconds of one round")
    parser.add_argument("--compile", default="all", help="which cases PyTorch also compiles: those whose name holds it")
    parser.add_argument("--only", default="", help="kernels: those cases whose name holds it, into no file")
    args = parser.parse_args()
    args.parts = args.parts.replace(" ", ",").split(",")
    if not set(args.parts) <= set(PARTS):
        parser.error(f"the parts are {', '.join(PARTS)}")
    if args.rehearse:
        args.rounds, args.compile = min(args.rounds, 2), "rmsnorm backward, wide" if args.compile == "all" else args.compile
        args.seconds = args.seconds or 3600
    return args


def kernel_rows(runner, whole, runs, peers):
    whole["cases"] = merge(runs, peers)
    shares(whole["cases"])
    whole["copy_gb_per_s"] = copy_rate(whole["cases"])
    whole["settings"] = {"rounds": runner.args.rounds, "ms": runner.args.ms}
    return bars(whole["cases"], "; ".join(runner.why))


def measure(runner, whole, part, keep):
    """Runs a part; what it finds replaces what the file has of it.  Its bars, and PyTorch's version."""
    torch = None
    if part == "kernels":
        runner.keep = lambda runs: keep(kernel_rows(runner, whole, runs, []))
        runs, peers = runner.kernels()
        found = kernel_rows(runner, whole, runs, peers)
        torch = next((r["torch"] for r in peers if r["event"] == "versions"), None)
    elif part == "step":
        whole["step"] = step.measure(runner, whole["device"])
        torch, found = whole["step"].get("torch"), step.bars(whole["step"], verdict)
    else:
        if part == "link":
            opened = whole["device"]["name"] != "no result"
            whole[part] = {"passed": int(opened), "failed": int(not opened), "skipped": 0, "not_passed": runner.why[:]}
        else:
            whole[part] = runner.tests(part)
        found = test_bars(part, whole[part])
    return found, torch


def no_bars(part):
    """Of a part that was never run."""
    return [] if part == "kernels" else step.bars({}, verdict) if part == "step" else test_bars(part, None)


def say_verdict(runner, part, found):
    count = {word: sum(v["verdict"] == word for v in found) for word in ("PASS", "FAIL", "not measured")}
    worst = "FAIL" if count["FAIL"] else "PASS" if count["PASS"] else "not measured"
    runner.say(f"{part}: {worst if not runner.args.rehearse or part not in ('kernels', 'step') else 'rehearsed'} ("
               + ", ".join(f"{n} {word}" for word, n in count.items() if n) + ")")


def main():
    args = arguments()
    runner, now = Runner(args), datetime.datetime.now(datetime.timezone.utc)
    device = describe(runner)
    folder = "build/rehearsal" if args.rehearse else "tests/bench/results"
    path = os.path.join(ROOT, folder, f"gpu-{short_name(device['name'])}-{now.strftime('%Y-%m-%d')}.json")
    whole = {}
    if os.path.exists(path):
        with open(path) as f:
            whole = json.load(f)
    writes = device["name"] != "no result" and not args.only
    fresh = {part: [bar for bar in whole.get("bars", []) if bar.get("part") == part] for part in PARTS}
    whole.update(date=now.strftime("%Y-%m-%d %H:%M UTC"), device=device)
    for name, empty in (("link", None), ("rules", None), ("attention", None), ("fp8", None), ("tests", None), ("cases", {}),
                        ("copy_gb_per_s", 0), ("settings", {}), ("step", None), ("parts", {})):
        whole.setdefault(name, empty)

    def save(part, found, torch=None):
        """What there is by now into the file, which is never half written."""
        fresh[part] = found
        whole["versions"] = versions(device, torch or whole.get("versions", {}).get("torch"))
        whole["bars"] = [dict(bar, part=p) for p in PARTS for bar in fresh[p] or no_bars(p)]
        if args.rehearse:
            whole["bars"] = unsaid(whole["bars"])
        if not writes:
            return
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path + ".new", "w") as f:
            json.dump(whole, f, indent=1)
            f.write("\n")
        os.replace(path + ".new", path)

    done = []
    for part in [p for p in PARTS if p in args.parts]:
        runner.commands, began = [], time.time()
        runner.why = runner.why if part == "link" else []
        runner.begin(part)
        if runner.left() < 5:
            runner.say(f"{part}: not begun, no time left; make gpu PART={part}")
            continue
        found, torch = measure(runner, whole, part, lambda bars_now: save(part, bars_now))
        whole["parts"][part] = {"seconds": round(time.time() - began), "commands": runner.commands, "left_out": runner.why,
                                "versions": versions(device, torch)}
        save(part, found, torch)
        say_verdict(runner, part, found)
        done.append(part)
        if part == "link" and not writes and not args.only:
            break
    show(whole, done)
    if not writes:
        return print("nothing is written") or (0 if args.only else 1)
    print(f"wrote {os.path.relpath(path, ROOT)}, {time.time() - runner.began:.0f} s in all")
    return 1 if any((whole.get(part) or {}).get("failed") for part in done if part not in ("kernels", "step")) else 0


if __name__ == "__main__":
    sys.exit(main())
