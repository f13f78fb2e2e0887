"""Tests the CUDA backend on the GPU, times it beside PyTorch, and writes medians and a verdict per bar as one JSON file.

    python3 tests/gpu/run.py [--rows "attention kernels:norms step:*"] [--bin build/gpu] [--seconds 575] [--results FOLDER]
    python3 tests/gpu/run.py --bin build/rehearsal --rehearse
    python3 tests/gpu/run.py --list [--rows ...]

`make gpu` calls it.  It works through PLAN row by row.  The order is that in which a row helps most if the GPU is available
only for minutes.  --list runs nothing, and prints when each row would begin if all took their limits, and which rows are left
for another run.  --rows chooses some of the rows: by name, by the part before the colon, or by a
pattern with *.  Their order does not change.

Each row has its own time limit, and one deadline holds for everything, building included.  A row that has too little time
left is reported as not measured, and shorter rows that follow are still tried.  Results are saved after each row, and after
each case of a row, so that an interrupted run keeps its results.  The rows of one day on one GPU share a file.  For each
row, it has the hashes of the sources that were measured.  Rows of tests run side by side, and rows of timings run alone.
The rounds of the backend and of PyTorch take turns, so that a change of the clock affects both alike.

PEER_TORCH names the Python that has PyTorch.  Without it, this Python is tried.  --rehearse uses programs built for the
model GPU, the smallest sizes, and PyTorch on CPU tensors.  The file is then written below build/, and its numbers mean
nothing.
"""
import argparse
import collections
import concurrent.futures
import datetime
import fnmatch
import glob
import hashlib
import json
import os
import platform
import queue
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time

import kernels
import step

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
WHOLE = 575         # seconds of everything


def at_once(cores=os.cpu_count()):
    """How many rows of tests, and test programs, run side by side: they compute on the CPU what is right."""
    return max(3, (cores or 1) // 2)


# seconds: at most; needs: the programs that make must have built; beside: it may run beside others that may.
Row = collections.namedtuple("Row", "name seconds needs beside")
BUILDING = 110      # seconds, with the start of the machine
# First what never ran on a GPU: the tables of fragments, the kernels for Hopper that rely on them, attention, fp8's bits.
EARLY = {"rules": "t_models", "hopper": "t_cuda_hopper", "attention": "t_cuda_attention", "fp8": "t_cuda_fp8"}
REST = sorted(os.path.basename(path)[:-4] for path in glob.glob(os.path.join(ROOT, "tests/cuda/t_cuda*.cpp"))
              if os.path.basename(path)[:-4] not in EARLY.values())
# Under compute-sanitizer: the tool, a program, and the tests of it whose names hold the last word.
SANITIZED = {"racecheck:attention": (110, "t_cuda_attention", "tensor_cores_and_head_sizes"),
             "racecheck:norms": (80, "t_cuda_operators", "norm_gradient_in_short"),
             "memcheck:hopper": (40, "t_cuda_hopper", "heads_that_share_keys"),
             "synccheck:hopper": (40, "t_cuda_hopper", "heads_that_share_keys"),
             "memcheck:softmax": (40, "t_cuda_operators", "softmax_backward"),
             "memcheck:losses": (40, "t_cuda_operators", "cross_entropy_long_rows"),
             "synccheck:embedding": (40, "t_cuda_operators", "embedding_backward"),
             "racecheck:gpt": (60, "t_cuda_gpt", "same_bits"),
             "racecheck:attention-tiles": (100, "t_cuda_attention", "tensor_cores_and_tiles")}
FIRST = ("racecheck:attention", "racecheck:norms", "memcheck:hopper", "synccheck:hopper")     # the rest after the timings
# What these parts of the file hold is a count of tests.
TESTS = ("link", "rules", "hopper", "attention", "fp8", "tests", "sanitizers")


def timing(name, seconds, *needs):
    return Row(name, seconds, list(needs), False)


def sanitized(names):
    return [Row(name, SANITIZED[name][0], [SANITIZED[name][1]], True) for name in names]


PLAN = ([timing("link", 20, "bench_gpu")] +
        [Row(name, 100, [program], True) for name, program in EARLY.items()] + [Row("tests", 120, REST, True)] +
        sanitized(FIRST) +
        [Row("step:init", 60, ["train_gpt"], True)] +
        [timing(f"step:{name}", 28, "train_gpt") for name in ("bf16", "bf16-graph", "fp8-current", "fp8-delayed")] +
        [timing("probe", 30, "probe_gemm")] +
        [timing(f"kernels:{group}", seconds, "bench_gpu") for group, seconds in
         (("products", 60), ("attention", 30), ("norms", 35))] +
        sanitized(name for name in SANITIZED if name not in FIRST) +
        [timing(f"step:{name}", 28, "train_gpt") for name in ("profile", "tf32", "fp16", "bf16-not-tuned", "bf16-recompute",
                                                             "bf16-stream")] +
        [timing(f"data:{what}", 25, "bench_data") for what in ("loader", "masks")] +
        [timing(f"peer:{name}", seconds, "train_gpt") for name, seconds in
         (("tf32-eager", 25), ("fp16-eager", 20), ("fp16-compile", 45), ("bf16-few-compile", 45))] +
        [timing("step:ncu", 40, "train_gpt"), timing("step:curve", 30, "train_gpt")] +
        [timing(f"peer:{name}", seconds, "train_gpt") for name, seconds in
         (("bf16-compile", 50), ("bf16-eager", 20), ("bf16-few-eager", 15))] +
        [timing(f"step:{name}", 28, "train_gpt") for name in ("bf16-few", "bf16-few-graph", "fp32")] +
        [timing(f"kernels:{group}", 30, "bench_gpu") for group in
         ("losses", "optimizers", "softmaxes", "gradients", "pointwise", "embeddings", "casts")] +
        [timing(f"compiled:{group}", 60, "bench_gpu") for group in
         ("losses", "norms", "products", "pointwise", "softmaxes", "embeddings", "casts")] +
        [timing(f"peer:{name}", 45, "train_gpt") for name in ("fp32-eager", "fp32-compile", "tf32-compile")])
# In a rehearsal: what takes long on the CPU and is tested elsewhere is left out, and one row stands for its kind.
REHEARSED = ("link", "rules", "tests", "racecheck:attention", "step:init", "step:bf16", "step:bf16-graph", "step:profile",
             "step:bf16-stream", "step:ncu", "peer:bf16-eager", "peer:tf32-eager", "probe", "data:*", "kernels:*",
             "compiled:casts")
LACKING = ("PyTorch", "$PEER_TORCH", "kernel times of train_gpt: ncu")     # what may be missing where it is rehearsed
REHEARSED_REST = ["t_cuda_inputs", "t_cuda_telemetry"]


def plan(args):
    """The rows to do."""
    rows = PLAN
    if args.rehearse:
        rows = [row._replace(needs=REHEARSED_REST) if row.name == "tests" else row for row in rows
                if any(fnmatch.fnmatch(row.name, pattern) for pattern in REHEARSED)]
        rows = [row._replace(needs=[]) if row.name in SANITIZED else row for row in rows]
    words = args.rows.replace(",", " ").split()
    for word in words:
        if not any(matches(row, word) for row in PLAN):
            sys.exit(f"--rows: no row is named {word}; they are: {' '.join(row.name for row in PLAN)}")
    return [row for row in rows if not words or any(matches(row, word) for word in words)]


def matches(row, word):
    return word in (row.name, row.name.split(":")[0]) or fnmatch.fnmatch(row.name, word)


def without_paths(text):
    """Error texts may name folders of this machine; the results must not."""
    return re.sub(r"(?<![\w.])(/[\w.+@-]+)+/", "", text)


class Talk:
    """A program that answers lines on its input by lines of JSON; it runs on between the questions."""
    def __init__(self, command, env):
        self.errors, self.heard, self.greeted = tempfile.TemporaryFile("w+"), queue.Queue(), False
        self.child = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      stderr=self.errors, text=True, start_new_session=True)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for text in self.child.stdout:
            if text.startswith("{") and text.endswith("}\n"):
                self.heard.put(json.loads(text))
        self.heard.put(None)

    def tell(self, text):
        try:
            self.child.stdin.write(text + "\n")
            self.child.stdin.flush()
        except OSError:                         # it has ended; hear says so
            pass

    def hear(self, seconds):
        """Its next answer; None where it has ended or says nothing in this time, after which it is ended."""
        try:
            found = self.heard.get(timeout=max(0.1, seconds))
        except queue.Empty:
            found = None
        if found is None:
            self.end()
        return found

    def ask(self, text, seconds):
        self.tell(text)
        return self.hear(seconds)

    def messages(self):
        self.errors.seek(0)
        return [text.strip() for text in self.errors if text.strip()]

    def end(self):
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGKILL)
            self.child.wait()

    @property
    def alive(self):
        return self.child.poll() is None


class Session:
    """What all rows share: the arguments, the deadline, the file, and programs that run on from row to row."""
    def __init__(self, args):
        self.args, self.began, self.root = args, args.began or time.time(), ROOT
        self.last = self.began + (args.seconds or WHOLE)
        self.bin = os.path.join(ROOT, args.bin)
        self.python = os.environ.get("PEER_TORCH") or sys.executable
        self.env = dict(os.environ, GPU_BIN=args.bin, GPU_MODEL="1" if args.rehearse else "0",
                        PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")     # its largest steps leave no room for gaps
        self.talks, self.lock, self.steps, self.cases = {}, threading.RLock(), None, None
        self.watch = step.Watch()               # the clock and the power of each row

    def say(self, text):
        print(f"[{time.time() - self.began:5.0f} s] {text}", flush=True)

    def talk(self, name, command):
        """The running program of this name, begun if it is not there."""
        if name not in self.talks or not self.talks[name].alive:
            self.talks[name] = Talk(command, self.env)
        return self.talks[name]

    def close(self):
        for talk in self.talks.values():
            talk.end()
        self.watch.close()


class Runner:
    """One row: its time, its commands, and what it had to leave out."""
    def __init__(self, session, row):
        self.session, self.row, self.commands, self.why = session, row, [], []
        self.args, self.bin, self.root, self.env, self.python = (session.args, session.bin, ROOT, dict(session.env),
                                                                session.python)
        self.began = time.time()
        self.end = min(session.last, self.began + (3600 if self.args.rehearse else row.seconds))

    def left(self):
        return self.end - time.time()

    def extend(self, seconds):
        """As long as something took that serves other rows too."""
        self.end = min(self.session.last, self.end + seconds)

    def say(self, text):
        self.session.say(f"{self.row.name}: {text}")

    def skip(self, why):
        """Says and keeps why something was not measured, or not wholly."""
        self.why.append(without_paths(why))
        self.say(f"skipped: {self.why[-1]}")

    def shown(self, command):
        if command not in self.commands:
            self.commands.append(command)

    def wait(self, child, seconds):
        """The exit status, or None where the time was not enough; then nothing of the program is left."""
        try:
            return child.wait(max(1, seconds))
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def lines(self, shown, command, seconds):
        """The JSON lines that a program printed, also of one that did not come to its end.  shown: its command line as
        the results name it."""
        self.shown(shown)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
            try:
                child = subprocess.Popen(command, cwd=ROOT, env=self.env, stdout=out, stderr=errors, text=True,
                                         start_new_session=True)
            except OSError as error:
                return self.skip(f"{shown}: {error}") or []
            status = self.wait(child, seconds)
            out.seek(0)
            errors.seek(0)
            found = [json.loads(text) for text in out if text.startswith("{") and text.endswith("}\n")]
            last = ([text.strip() for text in errors if text.strip()] or ["no message"])[-1]
        failed = [f"{record.get('case', '')}: {record['why']}" for record in found if record["event"] == "failed"]
        if status is None:
            self.skip(f"{shown}: stopped after {max(1, seconds):.0f} s")
        elif status != 0 or not found:
            self.skip(f"{shown} ended with {status}: {'; '.join(failed) or last}")
        return found

    # ---- The tests

    def unbuilt(self):
        """The programs that make did not build of these sources."""
        newest = max(os.path.getmtime(os.path.join(ROOT, name)) for name in ("amp.h", "amp_cuda.cu"))
        paths = {name: os.path.join(self.bin, name) for name in self.row.needs}
        return [name for name, path in paths.items() if not os.path.exists(path) or os.path.getmtime(path) < newest]

    def program(self, program, seconds):
        """Runs a test program: the counts of its closing line, and what it printed."""
        with tempfile.TemporaryFile("w+") as out:
            child = subprocess.Popen(["sh", "tests/run.sh", program], cwd=ROOT, env=self.env, stdout=out,
                                     stderr=subprocess.STDOUT, start_new_session=True)
            status = self.wait(child, seconds)
            out.seek(0)
            lines = out.read().splitlines()
        if status is None:
            lines += [f"FAIL {os.path.basename(program)}: did not come to its end in {seconds:.0f} s",
                      "0 passed, 1 failed, 0 skipped"]
        counts = [int(n) for n in re.findall(r"(\d+) (?:passed|failed|skipped)", lines[-1] if lines else "")]
        if len(counts) != 3:
            counts, lines = [0, 1, 0], lines + [f"FAIL {os.path.basename(program)}: ran no test"]
        self.say("\n    ".join(lines[:-1]))
        return counts, [without_paths(text.strip()) for text in lines]

    def programs(self, programs):
        """Runs several at a time: the sums of their counts, what failed or was skipped, and cuBLASLt's and the tensor cores'
        rules that were confirmed or struck."""
        self.shown(" ".join(["sh tests/run.sh"] + [os.path.basename(program) for program in programs]))
        with concurrent.futures.ThreadPoolExecutor(at_once()) as pool:
            found = list(pool.map(lambda program: self.program(program, self.left()), programs))
        lines = [text for _, text in found for text in text]
        out = {"programs": [os.path.basename(program) for program in programs]}
        out.update({word: sum(counts[i] for counts, _ in found) for i, word in enumerate(("passed", "failed", "skipped"))})
        out["not_passed"] = [text for text in lines if text.startswith(("FAIL", "skip"))]
        rules = [text for text in lines if text.startswith(("confirmed: ", "struck: "))]
        if rules:
            out.update(rules_confirmed=sum(rule.startswith("confirmed") for rule in rules),
                       rules_struck=[rule for rule in rules if rule.startswith("struck")])
        return out

    def sanitize(self):
        tool = self.row.name.split(":")[0]
        _, program, tests = SANITIZED[self.row.name]
        self.env.update(SANITIZE=f"{tool} {program} {tests}", SANITIZE_SECONDS=str(int(max(1, self.left() - 5))))
        return self.programs(["tests/gpu/sanitize.sh"])


# ---- The rows

def do_link(runner, whole):
    """Whether the backend links and opens the GPU, as bench_gpu showed when the device was described."""
    opened = whole["device"]["name"] != "no result"
    return {"passed": int(opened), "failed": int(not opened), "skipped": 0, "not_passed": runner.why[:]}


def do_row(runner, whole, save):
    """Does one row; what it finds replaces what the file has of it."""
    session, (part, _, what) = runner.session, runner.row.name.partition(":")
    found = None
    if part == "link":
        found = do_link(runner, whole)
    elif part in EARLY or part == "tests":
        found = runner.programs([os.path.join(runner.args.bin, name) for name in runner.row.needs if name not in runner.unbuilt()])
        for name in runner.unbuilt():
            found["failed"] += 1
            found["not_passed"].append(f"FAIL {name}: was not built")
    elif runner.row.name in SANITIZED:
        one = runner.sanitize()
        with session.lock:
            whole["sanitizers"] = dict(whole["sanitizers"] or {}, **{runner.row.name: one})
    elif part in ("kernels", "compiled"):
        kernels.measure(runner, whole, what, part == "compiled", save)
    elif part in ("step", "peer"):
        session.steps = session.steps or step.Steps(session, whole)
        session.steps.do(runner, part, what)
    else:
        name = {"probe": "probe_gemm", "data": "bench_data"}[part]
        do_program(runner, whole, name, what)
    if found is not None:
        with session.lock:
            whole[part] = found


def do_program(runner, whole, name, what):
    """A program whose lines are kept as they are: the probe of products, the loader, the masks; beside the loader, PyTorch's."""
    flags = ([what] if what else []) + (["--tiny"] if runner.args.rehearse else [])
    found = runner.lines(shlex.join([name] + flags), [os.path.join(runner.bin, name)] + flags, runner.left())
    if what == "loader":
        peer = ["tests/gpu/peer_data.py"] + (["--device", "cpu", "--tiny"] if runner.args.rehearse else [])
        found += runner.lines("$PEER_TORCH " + " ".join(peer), [runner.python] + peer, runner.left())
    whole[what or runner.row.name] = [record for record in found if record["event"] not in ("device", "versions")]
    for record in found:
        if record.get("best", 1):               # of the ways of a product, the fastest
            runner.say(json.dumps(record))


# ---- Verdicts, the file, and what is printed

def verdict(bar, needs, measured, why="", at_least=0.0):
    if measured is None:
        return {"bar": bar, "needs": needs, "measured": None, "verdict": "not measured", "why": why}
    return {"bar": bar, "needs": needs, "measured": measured, "verdict": "PASS" if measured >= at_least else "FAIL"}


def counted(found):
    """Tests of a part: one count, or one of each row."""
    return found if found is None or "failed" in found else {
        word: sum(one[word] for one in found.values()) for word in ("passed", "failed", "skipped")}


def test_bar(part, found):
    failed = counted(found)["failed"] if found else None
    what = {"link": "the backend links and opens the GPU", "rules": "fragments and rules", "attention": "attention's tests",
            "hopper": "attention for Hopper, by wgmma", "fp8": "fp8: operands' bits, and products beside the CPU's", "tests": "all other tests",
            "sanitizers": "compute-sanitizer finds nothing"}
    return {"bar": what[part], "needs": "none fails", "measured": failed,
            "verdict": "not measured" if found is None else "FAIL" if failed else "PASS"}


def bars(whole, rehearse):
    """Of everything the file has, by its part."""
    why = "; ".join(text for part in whole["parts"].values() for text in part.get("left_out", []))
    out = [dict(test_bar(part, whole.get(part)), part=part) for part in TESTS]
    out += [dict(bar, part="kernels") for bar in kernels.bars(whole["cases"], verdict, why)]
    out += [dict(bar, part="step") for bar in step.bars(whole["step"] or {}, verdict)]
    return [dict(bar, measured=None, verdict="not measured", why="a rehearsal") for bar in out] if rehearse else out


def show(whole, rows):
    """What misses its bar, then the tables, of the parts that were run."""
    parts = {row.name.split(":")[0].replace("compiled", "kernels").replace("peer", "step") for row in rows}
    verdicts = [v for v in whole["bars"] if v["part"] in parts]
    rehearsal = any(v.get("why") == "a rehearsal" for v in verdicts)
    for v in verdicts:
        if v["verdict"] != "PASS" and v.get("why") != "a rehearsal":
            print(f"{v['verdict']}: {v['bar']}, {v['needs']}" +
                  (f": {v['measured']:g}" if v["measured"] is not None else f" ({v.get('why') or 'no result'})"))
    print(f"\n{whole['device']['name']}, {whole['date']}" + ("; a rehearsal, no number says anything" if rehearsal else ""))
    if "kernels" in parts and whole["cases"]:
        kernels.show(whole["cases"], verdicts, whole["copy_gb_per_s"])
    if "step" in parts and whole["step"]:
        step.show(whole["step"])
    met = sum(v["verdict"] == "PASS" for v in verdicts)
    print("A rehearsal measures no bar." if rehearsal else f"{met} of {len(verdicts)} bars are met.")


def versions(session, whole):
    """What was measured, and by what: a record says of which sources it speaks."""
    out, device, torch = collections.OrderedDict(), whole["device"], getattr(session, "torch", None) or {}
    for name in ("amp.h", "amp_cuda.cu", "tests/gpu/bench_gpu.cu", "tests/gpu/peer_gpu.py", "examples/train_gpt.c"):
        with open(os.path.join(ROOT, name), "rb") as f:
            out[name] = "sha256 " + hashlib.sha256(f.read()).hexdigest()[:16]
    out["nvcc"] = session.nvcc
    for name in ("driver", "runtime", "cublas"):
        out[name] = device.get(name)
    before = whole.get("versions", {})
    out["torch"], out["torch cublas"] = torch.get("torch") or before.get("torch"), torch.get("cublas") or before.get("torch cublas")
    out["python"] = platform.python_version()
    return out


def short_name(name):
    return re.sub(r"[^a-z0-9]+", "-", name.lower().replace("nvidia", "")).strip("-") or "gpu"


def describe(runner):
    """The device, from bench_gpu, which every row builds."""
    found = runner.lines("bench_gpu --describe", [os.path.join(runner.bin, "bench_gpu"), "--describe"], 60)
    device = next((r for r in found if r["event"] == "device"), {"name": "no result"})
    return dict({k: v for k, v in device.items() if k not in ("event", "rounds", "ms")},
                **({"name": "model"} if runner.args.rehearse else {}))


class File:
    """The day's results of this GPU; never half written."""
    def __init__(self, session, device):
        now, args = datetime.datetime.now(datetime.timezone.utc), session.args
        folder = args.results or ("build/rehearsal" if args.rehearse else "tests/bench/results")
        self.path = os.path.join(ROOT, folder, f"gpu-{short_name(device['name'])}-{now.strftime('%Y-%m-%d')}.json")
        self.session, self.whole, self.written = session, {}, device["name"] != "no result"
        if os.path.exists(self.path) and not args.rehearse:
            with open(self.path) as f:
                self.whole = json.load(f)
        self.whole.update(date=now.strftime("%Y-%m-%d %H:%M UTC"), device=device)
        for name, empty in [(name, None) for name in TESTS] + [("cases", {}), ("copy_gb_per_s", 0), ("settings", {}),
                                                               ("step", None), ("parts", {})]:
            self.whole.setdefault(name, empty)

    def save(self):
        with self.session.lock:
            self.whole["versions"] = versions(self.session, self.whole)
            self.whole["bars"] = bars(self.whole, self.session.args.rehearse)
            if not self.written:
                return
            os.makedirs(os.path.dirname(self.path), exist_ok=True)
            with open(self.path + ".new", "w") as f:
                json.dump(self.whole, f, indent=1)
                f.write("\n")
            os.replace(self.path + ".new", self.path)


def turn(session, file, row):
    """One row from its beginning to its place in the file; False: there was no time."""
    runner = Runner(session, row)
    if not session.args.rehearse and runner.left() < row.seconds / 2:
        session.say(f"{row.name}: not begun, {max(0, runner.left()):.0f} s are left of the {row.seconds} it may take")
        return False
    session.say(f"{row.name}: begins, {runner.left():.0f} s")
    try:
        do_row(runner, file.whole, file.save)
    except Exception as error:                  # one row's fault must not cost the others
        runner.skip(f"{type(error).__name__}: {error}")
        if session.args.rehearse:
            raise
    with session.lock:
        file.whole["parts"][row.name] = {"seconds": round(time.time() - runner.began), "commands": runner.commands,
                                         "left_out": runner.why, "versions": versions(session, file.whole),
                                         "gpu": session.watch.between(runner.began, time.time())}
    file.save()
    return True


def do_all(session, file, rows):
    """Rows in their order; those that may run beside one another do.  What was done."""
    done = []
    while rows:
        n = next((i for i, row in enumerate(rows) if not row.beside), len(rows)) or 1
        together, rows = rows[:n], rows[n:]
        with concurrent.futures.ThreadPoolExecutor(at_once()) as pool:
            done += [row for row, begun in zip(together, list(pool.map(lambda row: turn(session, file, row), together))) if begun]
        if not file.written:
            break
    return done


def begins(rows, whole, beside):
    """When each row would begin if building and all rows took their limits, and the end; None where it would not fit."""
    found, now = {}, BUILDING
    while rows:
        n = next((i for i, row in enumerate(rows) if not row.beside), len(rows)) or 1
        free = [now] * (beside if rows[0].beside else 1)
        for row in rows[:n]:
            worker = free.index(min(free))
            found[row.name] = free[worker] if free[worker] + row.seconds <= whole else None
            free[worker] += row.seconds if found[row.name] is not None else 0
        now, rows = max(free), rows[n:]
    return found, now


def listed(rows, whole, cores):
    """The dry run: the rows of one run with their times, and those that another run would do."""
    at, end = begins(rows, whole, at_once(cores))
    lines = [f"{'building':24s} {BUILDING:4d} s  from    0 s"]
    lines += [f"{row.name:24s} {row.seconds:4d} s  from {at[row.name]:4d} s" for row in rows if at[row.name] is not None]
    lines.append(f"{len(lines) - 1} rows, {end:g} s at most with building; {at_once(cores)} rows of tests side by side")
    left = [row for row in rows if at[row.name] is None]
    if left:
        lines.append(f"Another run, of {sum(row.seconds for row in left)} s: make gpu ROWS=\"{' '.join(row.name for row in left)}\"")
    return lines


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="some of the plan: names, parts, patterns with *")
    parser.add_argument("--list", action="store_true", help="print the plan")
    parser.add_argument("--cores", type=int, default=os.cpu_count(), help="of the machine with the GPU, for --list")
    parser.add_argument("--needs", action="store_true", help="print the programs that its rows need")
    parser.add_argument("--bin", default="build/gpu", help="folder of the programs, from the project's root")
    parser.add_argument("--results", default="", help="folder of the file; default tests/bench/results")
    parser.add_argument("--rehearse", action="store_true", help="they are built for the model GPU")
    parser.add_argument("--began", type=float, default=0, help="when building began, in seconds since 1970")
    parser.add_argument("--seconds", type=float, default=0, help=f"for everything; default {WHOLE}")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ms", type=float, default=12, help="milliseconds of one round")
    args = parser.parse_args()
    if args.rehearse:
        args.rounds, args.ms, args.seconds = 1, 1, args.seconds or 3600
    return args


def main():
    args = arguments()
    rows = plan(args)
    if args.list:
        return print("\n".join(listed(rows, args.seconds or WHOLE, args.cores)))
    if args.needs:
        return print(" ".join(dict.fromkeys(["bench_gpu"] + [name for row in rows for name in row.needs])))
    session = Session(args)
    session.nvcc = subprocess.run(["sh", "tests/gpu/find.sh", "release"], cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout.strip()
    file = File(session, describe(Runner(session, PLAN[0])))
    try:
        done = do_all(session, file, rows)
    finally:
        session.close()
    file.save()
    show(file.whole, done)
    left = [row.name for row in rows if row not in done]
    if left:
        print(f"Not begun: make gpu ROWS=\"{' '.join(left)}\"")
    if not file.written:
        return print("nothing is written") or 1
    print(f"wrote {os.path.relpath(file.path, ROOT)}, {time.time() - session.began:.0f} s in all")
    failed = [part for part in TESTS if (counted(file.whole.get(part)) or {}).get("failed")]
    unsound = [text for part in file.whole["parts"].values() for text in part["left_out"] if not text.startswith(LACKING)]
    return 1 if failed or (args.rehearse and unsound) else 0


if __name__ == "__main__":
    sys.exit(main())
