"""Runs the benchmarks and their peers in turn, and writes medians, ratios and a verdict per bar as one JSON file.

    python3 tests/bench/run.py [--only gemm,step,loader,masks,recompute] [--rounds 3] [--threads 2] [--wait 600]
    python3 tests/bench/run.py --only curves
    python3 tests/bench/run.py --only accuracy

`make bench`, `make bench-curves` and `make accuracy` call it.  Peers are named by environment variables.  A peer that is
not set is skipped:

    PEER_TORCH        a Python with PyTorch: runs tests/bench/peer_torch.py
    PEER_LLMC         llm.c's train_gpt2, or its folder, which you have built.  A 124M checkpoint and tokens must be
                      where it reads them.  The times of its steps are read from its output
    PEER_BLAS         the same, with its matrix products done by a BLAS
    PEER_LLMC_LOADER  a program that times llm.c's loader and prints {"event": "loader", "tokens_per_s": ...}

--before FOLDER compares steps and products with amp.h at another commit.  FOLDER has that commit's bench_step and
bench_gemm.

It needs no package beyond Python 3.8's own library.
"""
import argparse
import collections
import datetime
import hashlib
import json
import os
import platform
import pty
import re
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
STEP_RUNS = [("124m", 64), ("124m", 256), ("11m", 64), ("11m", 256)]
RECOMPUTE_RUNS = [("11m", 256), ("11m", 1024)]
BATCH = 4
QUIET = 0.06


class Skip(Exception):
    """Why something was not measured."""


def without_paths(text):
    """Error texts may name folders of this machine; the results must not."""
    return re.sub(r"(/[\w.+@-]+)+/", "", text)


# ---- Running programs

class Machine:
    """Starts programs with the same threads, one at a time, on a machine that is otherwise quiet."""

    def __init__(self, args):
        self.args, self.busy, self.commands, self.line = args, [], collections.OrderedDict(), {}
        self.env = dict(os.environ, OMP_NUM_THREADS=str(args.threads), OPENBLAS_NUM_THREADS=str(args.threads))

    def others(self, work):
        """work(), and the share of all cores that other programs used meanwhile."""
        def read():
            own = resource.getrusage(resource.RUSAGE_CHILDREN)
            try:
                with open("/proc/stat") as f:
                    ticks = [int(v) for v in f.readline().split()[1:9]]
            except OSError:                     # no Linux: not known
                ticks = [0] * 8
            rate = os.sysconf("SC_CLK_TCK")
            return sum(ticks) / rate, (sum(ticks) - ticks[3] - ticks[4]) / rate - own.ru_utime - own.ru_stime
        before = read()
        result = work()
        after = read()
        return result, max(0.0, after[1] - before[1]) / max(0.01, after[0] - before[0])

    def quiet(self, work):
        """work() while other programs use at most 6% of the machine; within --wait seconds it is waited for, and done
        again.  What they used goes into the results."""
        end = time.time() + self.args.wait
        while True:
            while self.others(lambda: time.sleep(0.5))[1] > QUIET and time.time() < end:
                time.sleep(1.5)
            result, busy = self.others(work)
            if busy <= QUIET or time.time() >= end:
                self.busy.append(round(busy, 3))
                return result

    def run(self, key, shown, command, cwd=ROOT, timeout=1800):
        """The JSON lines of a program.  shown: its command line as the results name it."""
        self.commands[key] = shown
        done = self.quiet(lambda: subprocess.run(command, cwd=cwd, env=self.env, stdout=subprocess.PIPE,
                                                 stderr=subprocess.PIPE, text=True, timeout=timeout))
        if done.returncode != 0:
            why = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise Skip(without_paths(f"{key} ended with {done.returncode}: {why}"))
        return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]

    def program(self, name, before=False):
        path = os.path.join(ROOT, self.args.before if before else self.args.bin, name)
        if not os.path.exists(path):
            raise Skip(f"{name} is not built")
        return path

    def own(self, program, *flags, before=False):
        path, flags = self.program(program, before), [str(flag) for flag in flags]
        shown = " ".join((["before:"] if before else []) + [program] + flags)
        lines = self.run(shown, shown, [path] + flags)
        if not before:
            self.line = lines[0]                # says what CPU, kernels and compiler
        return lines

    def torch(self, *flags):
        python = self.peer("PEER_TORCH")
        flags = [str(flag) for flag in flags]
        shown = " ".join(["$PEER_TORCH tests/bench/peer_torch.py"] + flags)
        return self.run(shown, shown, [python, os.path.join(HERE, "peer_torch.py")] + flags)

    def peer(self, name):
        value = os.environ.get(name)
        if not value:
            raise Skip(f"{name} is not set")
        if os.path.isdir(value):
            value = os.path.join(value, "train_gpt2")
        found = shutil.which(value)
        if not found:
            raise Skip(f"{name} names no program")
        return os.path.abspath(found)

    def llmc_steps(self, name, wanted):
        """Milliseconds of `wanted` steps of llm.c's program; its first step, which allocates, does not count."""
        program = self.peer(name)
        self.commands[name] = f"${name} (OMP_NUM_THREADS={self.args.threads})"
        return self.quiet(lambda: self.llmc_run(name, program, wanted))

    def llmc_run(self, name, program, wanted):
        reader, writer = pty.openpty()          # a terminal, so that each line comes when it is printed
        child = subprocess.Popen([program], cwd=os.path.dirname(program), env=self.env, stdout=writer, stderr=writer,
                                 stdin=subprocess.DEVNULL)
        os.close(writer)
        times, last = [], ""
        try:
            with os.fdopen(reader, errors="replace") as lines:
                for line in lines:
                    match = re.search(r"^step (\d+): train loss .*\(took ([\d.]+) ms\)", line)
                    if match and int(match.group(1)) > 0:
                        times.append(float(match.group(2)))
                    last = line.strip() or last
                    if len(times) == wanted:
                        break
        except OSError:                         # the terminal closes when the program ends
            pass
        finally:
            child.terminate()
            child.wait()
        if not times:
            raise Skip(without_paths(f"{name} printed no step: {last}"))
        return times


# ---- Training steps

class Contestant:
    """One program in one precision; records holds a record per round."""

    def __init__(self, name, measure):
        self.name, self.measure, self.records, self.skipped = name, measure, [], None

    def round(self):
        if self.skipped is not None:
            return
        try:
            self.records.append(self.measure())
        except (Skip, subprocess.TimeoutExpired) as error:
            self.skipped = without_paths(str(error))
        print(f"    {self.name:24s} " + (f"skipped: {self.skipped}" if self.skipped is not None
                                         else f"{self.records[-1]['median_ms']:9.1f} ms"), flush=True)

    def result(self):
        if not self.records:
            return {"skipped": self.skipped}
        median = statistics.median(r["median_ms"] for r in self.records)
        out = {"median_ms": round(median, 3), "best_ms": round(min(r["best_ms"] for r in self.records), 3),
               "rounds_ms": [round(r["median_ms"], 3) for r in self.records],
               "tokens_per_s": round(statistics.median(r["tokens_per_s"] for r in self.records), 1)}
        for part in ("forward_ms", "backward_ms", "update_ms"):
            if part in self.records[0]:
                out[part] = round(statistics.median(r[part] for r in self.records), 3)
        return out


def step_contestants(machine, model, seq):
    args = machine.args
    steps = args.steps or (8 if model == "124m" else 30)
    shared = ["--model", model, "--batch", BATCH, "--seq", seq, "--threads", args.threads, "--steps", steps]

    def own(precision, before=False):
        return lambda: machine.own("bench_step", *shared, "--warmup", 2, "--precision", precision, before=before)[-1]

    def torch(precision, *flags):
        return lambda: machine.torch("step", *shared, "--warmup", 3, "--precision", precision, *flags)[-1]

    def llmc(name):
        def measure():
            times = machine.llmc_steps(name, min(steps, 5))
            median = statistics.median(times)
            return {"median_ms": median, "best_ms": min(times), "tokens_per_s": BATCH * seq / median * 1e3}
        return measure

    out = []
    for precision in args.precisions.split(","):
        out.append(Contestant(f"amp.h {precision}", own(precision)))
        if args.before:
            out.append(Contestant(f"before {precision}", own(precision, before=True)))
        if precision in (args.torch_precisions or args.precisions).split(","):
            out += [Contestant(f"torch eager {precision}", torch(precision)),
                    Contestant(f"torch compile {precision}", torch(precision, "--compile"))]
    if (model, seq) == ("124m", 64):            # what llm.c's program is written for
        out += [Contestant("llm.c", llmc("PEER_LLMC")), Contestant("llm.c with BLAS", llmc("PEER_BLAS"))]
    return out


def ratio(contestants, ours, peer):
    """How many times as fast as the peer: the median of the rounds' ratios, so that a slow hour hurts both."""
    a = contestants[ours].records
    b = contestants[peer].records
    if not a or not b:
        raise Skip(contestants[ours].skipped or contestants[peer].skipped or "not measured")
    return statistics.median(y["median_ms"] / x["median_ms"] for x, y in zip(a, b))


def step_ratios(contestants):
    pairs = [("amp.h fp32", name) for name in ("llm.c", "llm.c with BLAS")]
    for precision in ("fp32", "bf16", "fp16"):
        pairs += [(f"amp.h {precision}", f"{name} {precision}") for name in ("before", "torch eager", "torch compile")]
    pairs += [("amp.h bf16", "amp.h fp32"), ("amp.h fp16", "amp.h fp32"), ("before bf16", "before fp32"), ("before fp16", "before fp32")]
    out = collections.OrderedDict()
    for ours, peer in pairs:
        if ours in contestants and peer in contestants:
            try:
                out[f"{ours} / {peer}"] = round(ratio(contestants, ours, peer), 3)
            except Skip as skip:
                out[f"{ours} / {peer}"] = str(skip)
    return out


def run_steps(machine, runs):
    out = []
    for model, seq in runs:
        contestants = step_contestants(machine, model, seq)
        for number in range(machine.args.rounds):
            print(f"step {model}, batch {BATCH}, {seq} tokens, round {number + 1}", flush=True)
            turn = number % len(contestants)    # another order each round
            for contestant in contestants[turn:] + contestants[:turn]:
                contestant.round()
        out.append({"model": model, "batch": BATCH, "seq": seq,
                    "programs": collections.OrderedDict((c.name, c.result()) for c in contestants),
                    "ratios": step_ratios({c.name: c for c in contestants})})
    return out


# ---- Recomputing

def run_recompute(machine):
    """Peak memory and time of a step with all activations kept and with one block's, in turn."""
    out = []
    for model, seq in RECOMPUTE_RUNS:
        def way(recompute):
            flags = ["--model", model, "--batch", BATCH, "--seq", seq, "--threads", machine.args.threads, "--steps",
                     machine.args.steps or 8, "--warmup", 2, "--precision", "bf16", "--recompute", recompute]
            return lambda: machine.own("bench_step", *flags)[-1]
        ways = {"kept": Contestant("kept", way(0)), "recomputed": Contestant("recomputed", way(1))}
        for number in range(machine.args.rounds):
            print(f"recompute {model}, batch {BATCH}, {seq} tokens, round {number + 1}", flush=True)
            for contestant in list(ways.values())[::1 if number % 2 else -1]:
                contestant.round()
        row = collections.OrderedDict(model=model, batch=BATCH, seq=seq, precision="bf16")
        for name, contestant in ways.items():
            row[name] = contestant.result()
            for key in ("memory_bytes", "activation_bytes", "loss"):
                row[name].update({key: r[key] for r in contestant.records[-1:]})
        if row["kept"].get("loss") != row["recomputed"].get("loss"):
            raise Skip("the losses differ: recomputing is wrong")
        row["time"] = round(1 / ratio(ways, "recomputed", "kept"), 3)
        row["memory"] = round(row["recomputed"]["memory_bytes"] / row["kept"]["memory_bytes"], 3)
        out.append(row)
    return out


# ---- The other benchmarks

def gemm_once(machine, rounds, before=False):
    """What bench_gemm measured: a dictionary with its peaks and cases."""
    program = machine.program("bench_gemm", before)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "gemm.json")
        flags = ["--threads", str(machine.args.threads), "--rounds", str(rounds)]
        shown = " ".join((["before:"] if before else []) + ["bench_gemm"] + flags)
        machine.commands[shown] = shown
        done = machine.quiet(lambda: subprocess.run([program] + flags + ["--json", path], cwd=ROOT, env=machine.env,
                                                    stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        print(done.stdout, flush=True)
        if "not credible" in done.stdout:
            raise Skip("the peak loop ran below two FMAs a cycle: other programs, or sums that spill")
        if not os.path.exists(path):
            raise Skip(without_paths((done.stdout.strip().splitlines() or ["bench_gemm printed nothing"])[-1]))
        with open(path) as f:
            return json.load(f)


def gemm_beside(out, own, others):
    """Into each case the other programs' median rates, and the median of the rounds' ratios to them."""
    for name, rates in others.items():
        for case in out["cases"]:
            pairs = [(a[case["name"]], b[case["name"]]) for a, b in zip(own, rates) if b.get(case["name"])]
            if pairs:
                case[name] = round(statistics.median(b for _, b in pairs), 1)
                case[f"over {name}"] = round(statistics.median(a / b for a, b in pairs), 3)


def run_gemm(machine):
    """The programs in turn, each with its share of the rounds."""
    args, own, others = machine.args, [], {"before": [], "torch": []}
    inner, runs, torch_skipped = max(1, args.gemm_rounds // args.rounds), [], None
    for _ in range(args.rounds):
        runs.append(gemm_once(machine, inner))
        own.append({case["name"]: case["median"] for case in runs[-1]["cases"]})
        if args.before:
            others["before"].append({case["name"]: case["median"] for case in gemm_once(machine, inner, before=True)["cases"]})
        try:
            if torch_skipped is None:
                others["torch"].append({row["case"]: row["gflops"] for row in machine.torch("gemm", "--threads", args.threads, "--rounds", inner)})
        except (Skip, subprocess.TimeoutExpired) as error:
            torch_skipped = without_paths(str(error))
    out = runs[-1]
    for case in out["cases"]:
        case["median"] = round(statistics.median(rates[case["name"]] for rates in own), 1)
        case["peak"] = round(statistics.median(c["peak"] for r in runs for c in r["cases"] if c["name"] == case["name"]), 1)
    gemm_beside(out, own, others)
    if torch_skipped is not None:
        out["torch"] = {"skipped": torch_skipped}
    return out


def run_accuracy(machine):
    """What the tests measured against PyTorch's results: per figure the mean, the worst and the bound."""
    found = collections.OrderedDict()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "figures")
        for program in ("t_model", "t_kernels", "t_optimizer"):
            machine.commands[program] = f"AMPT_FIGURES=FILE {program}"
            subprocess.run([os.path.join(ROOT, machine.args.bin, program)], cwd=ROOT, check=True,
                           stdout=subprocess.DEVNULL, env=dict(machine.env, AMPT_FIGURES=path))
        with open(path) as f:
            for line in map(json.loads, f):
                found.setdefault(line["figure"], []).append(line)
    return [{"figure": name, "bound": rows[0]["bound"], "count": len(rows),
             "mean": float(f"{statistics.mean(r['value'] for r in rows):.3g}"),
             "worst": float(f"{max(r['value'] for r in rows):.3g}")} for name, rows in found.items()]


def run_loader(machine):
    out = {"own": machine.own("bench_loader", "--repeats", machine.args.rounds)}
    for name, measure in (("torch", lambda: machine.torch("loader")),
                          ("llm.c", lambda: machine.run("PEER_LLMC_LOADER", "$PEER_LLMC_LOADER",
                                                        [machine.peer("PEER_LLMC_LOADER")]))):
        try:
            out[name] = measure()
        except (Skip, subprocess.TimeoutExpired) as error:
            out[name] = [{"skipped": without_paths(str(error))}]
            print(f"    {name}'s loader skipped: {out[name][0]['skipped']}", flush=True)
    return out


# ---- Bars

def verdict(bar, needs, measure, at_most=False):
    """One row: what is promised, the limit, what was measured."""
    row = {"bar": bar, "needs": ("at most " if at_most else "at least ") + f"{needs:g}"}
    try:
        value = measure()
    except Skip as skip:
        return dict(row, measured=None, verdict="not measured", why=str(skip))
    good = value <= needs if at_most else value >= needs
    return dict(row, measured=float(f"{value:.4g}"), verdict="PASS" if good else "FAIL")


def gemm_bars(gemm):
    def share(case):
        def measure():
            peak = case["peak"]
            if not peak or not case["median"]:
                raise Skip("this CPU has no such instruction")
            if case["median"] > 1.02 * peak:
                raise Skip("faster than the peak, which is therefore false")
            return case["median"] / peak
        return measure
    return [verdict(f"GEMM {case['name']}: share of the peak", case["bar"], share(case))
            for case in gemm["cases"] if case["bar"] > 0]


def step_bars(steps):
    def of(row, key):
        def measure():
            value = row["ratios"].get(key, "not measured")
            if isinstance(value, str):
                raise Skip(value)
            return value
        return measure
    out = []
    for row in steps:
        name = f"step {row['model']} T={row['seq']}"
        if (row["model"], row["seq"]) == ("124m", 64):
            out += [verdict(f"{name}: fp32, times llm.c", 5, of(row, "amp.h fp32 / llm.c")),
                    verdict(f"{name}: fp32, times llm.c with BLAS", 1.6, of(row, "amp.h fp32 / llm.c with BLAS")),
                    verdict(f"{name}: bf16, times own fp32", 1.5, of(row, "amp.h bf16 / amp.h fp32"))]
        out += [verdict(f"{name}: {p}, times torch {mode} (goal 1.5)", 1, of(row, f"amp.h {p} / torch {mode} {p}"))
                for p in ("fp32", "bf16") for mode in ("eager", "compile")]
    return out


def loader_bars(loader):
    def of(event, key, pick, **where):
        rows = [r for r in loader["own"] if r["event"] == event and all(r[k] == v for k, v in where.items())]
        return lambda: pick(r[key] for r in rows)
    return [
        verdict("loader: CPU of next(), microseconds", 20, of("loader_next", "cpu_us_median", max), at_most=True),
        verdict("loader: allocations per batch", 0, of("loader_next", "allocations_per_batch", max), at_most=True),
        verdict("loader: tokens/s and worker, in order, slowest format", 5e8,
                of("loader_rate", "tokens_per_s_per_worker", min, shuffle=0, workers=1)),
        verdict("loader: tokens/s and worker, shuffled, slowest format", 5e8,
                of("loader_rate", "tokens_per_s_per_worker", min, shuffle=1, workers=1)),
        verdict("loader: tokens/s and worker, shuffled, two workers", 5e8,
                of("loader_rate", "tokens_per_s_per_worker", min, shuffle=1, workers=2)),
        verdict("loader: closing, ms at worst", 100, of("loader_close", "ms_worst", max), at_most=True),
    ]


def bars(results):
    """Every bar, also those of parts that were not run."""
    out = []
    for part, rows in (("gemm", gemm_bars), ("step", step_bars), ("loader", loader_bars)):
        if part in results:
            if "skipped" in results[part]:
                out.append({"bar": part, "measured": None, "verdict": "not measured", "why": results[part]["skipped"]})
            else:
                out += rows(results[part])
    return out


def show_bars(rows):
    for row in rows:
        value = "" if row["measured"] is None else f"{row['measured']:g}"
        limit = f"{row.get('needs', '')} {row.get('why', '')}"
        print(f"{row['verdict']:12s} {row['bar']:62s} {value:>10s}  {limit}".rstrip())


# ---- The file

def cpu_name():
    try:
        with open("/proc/cpuinfo") as f:
            return re.search(r"^model name\s*: (.*)$", f.read(), re.M).group(1)
    except (OSError, AttributeError):           # no Linux, or another processor
        return platform.machine()


def describe_machine(machine, results):
    """What the results depend on, and nothing that names this machine."""
    first = machine.line or next((part for part in results.values() if "cpu" in part), {})
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2 ** 30
    return {"cpu": first.get("cpu", cpu_name()), "cores": len(os.sched_getaffinity(0)),
            "path": first.get("path", ""), "amx": first.get("amx", 0), "memory_gib": round(memory),
            "system": platform.system(), "used_by_others": {"median": statistics.median(machine.busy or [0]),
                                                            "worst": max(machine.busy or [0])}}


def versions(machine):
    with open(os.path.join(ROOT, "amp.h"), "rb") as f:
        out = {"amp.h": "sha256 " + hashlib.sha256(f.read()).hexdigest()[:16], "python": platform.python_version()}
    out["amp.h version"], out["compiler"] = machine.line.get("version"), machine.line.get("compiler")
    python = os.environ.get("PEER_TORCH")
    if python:
        done = subprocess.run([python, "-c", "import torch; print(torch.__version__)"], stdout=subprocess.PIPE,
                              stderr=subprocess.DEVNULL, text=True)
        if done.returncode == 0:
            out["torch"] = done.stdout.strip()
    for name in ("PEER_LLMC", "PEER_BLAS"):
        if os.environ.get(name + "_VERSION"):
            out[name] = os.environ[name + "_VERSION"]
    return out


def short_name(cpu):
    words = re.sub(r"\([^)]*\)|@.*|\b(CPU|Processor|\d+-Core)\b", " ", cpu)
    return re.sub(r"[^a-z0-9]+", "-", words.lower()).strip("-") or "cpu"


def put_into(path, results, commands, used):
    """The parts of an earlier file of the same day, with those measured now in their place; and what programs it names."""
    with open(path) as f:
        whole = json.load(f)
    parts = collections.OrderedDict((k, whole[k]) for k in ("gemm", "step", "loader", "masks", "recompute") if k in whole)
    if isinstance(results.get("step"), list) and isinstance(parts.get("step"), list):
        now = {(row["model"], row["seq"]): row for row in results["step"]}
        old = [now.pop((row["model"], row["seq"]), row) for row in parts["step"]]
        results["step"] = old + list(now.values())
    parts.update(results)
    return parts, whole["commands"] + [c for c in commands if c not in whole["commands"]], {**whole["versions"], **used}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="gemm,step,loader,masks,recompute",
                        help="gemm, step, loader, masks, recompute, curves, accuracy")
    parser.add_argument("--bin", default="build", help="folder of the bench programs, from the project's root")
    parser.add_argument("--before", default="", help="folder of the same programs at another commit, to compare with")
    parser.add_argument("--precisions", default="fp32,bf16", help="of the steps")
    parser.add_argument("--torch-precisions", help="PyTorch's, where 16 bits are too slow to wait for; default: all")
    parser.add_argument("--out", default="tests/bench/results", help="folder for the JSON file")
    parser.add_argument("--name", help="what the file's name begins with; default: curves, accuracy or cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--gemm-rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=0, help="per round; default: 8 with 124M parameters, 30 with 11M")
    parser.add_argument("--models", default=",".join(f"{m}:{t}" for m, t in STEP_RUNS), help="model:tokens, ...")
    parser.add_argument("--wait", type=int, default=0, help="seconds to wait for a quiet machine before each program")
    parser.add_argument("--again", action="store_true", help="put what is measured now into today's file, in place of "
                        "the same parts and models there")
    args = parser.parse_args()
    parts = args.only.split(",")
    runs = [(item.split(":")[0], int(item.split(":")[1])) for item in args.models.split(",")]
    machine = Machine(args)
    work = {"gemm": lambda: run_gemm(machine), "step": lambda: run_steps(machine, runs),
            "loader": lambda: run_loader(machine),
            "accuracy": lambda: run_accuracy(machine),
            "recompute": lambda: run_recompute(machine),
            "masks": lambda: machine.own("bench_masks", "--threads", args.threads),
            "curves": lambda: machine.own("bench_curves", "--threads", args.threads)}
    results = collections.OrderedDict()
    for part in parts:
        if part not in work:
            parser.error(f"--only: {part} is not one of {', '.join(work)}")
        try:
            results[part] = work[part]()
        except Skip as skip:
            results[part] = {"skipped": str(skip)}
            print(f"{part} skipped: {skip}", flush=True)
    worst = max(machine.busy or [0])
    if worst > QUIET:
        print(f"Other programs used up to {worst:.0%} of the machine: ratios may be off; --wait waits for quiet.")
    now = datetime.datetime.now(datetime.timezone.utc)
    about = describe_machine(machine, results)
    os.makedirs(os.path.join(ROOT, args.out), exist_ok=True)
    kind = args.name or (parts[0] if parts in (["curves"], ["accuracy"]) else "cpu")
    name = f"{kind}-{short_name(about['cpu'])}-{now.strftime('%Y-%m-%d')}.json"
    path, commands, used = os.path.join(ROOT, args.out, name), list(machine.commands.values()), versions(machine)
    if args.again:
        results, commands, used = put_into(path, results, commands, used)
    rows = bars(results)
    whole = collections.OrderedDict(
        date=now.strftime("%Y-%m-%d %H:%M UTC"), machine=about, versions=used,
        settings={"threads": args.threads, "rounds": args.rounds}, commands=commands, bars=rows, **results)
    with open(path, "w") as f:
        json.dump(whole, f, indent=1)
        f.write("\n")
    show_bars(rows)
    print(f"wrote {os.path.join(args.out, name)}")


if __name__ == "__main__":
    sys.exit(main())
