"""Times whole training steps: train_gpt on the GPU beside PyTorch (peer_step.py), from the same weights on the same tokens.

run.py uses it: Steps measures one row at a time and adds it to the results, bars() rates the rows, and show() prints them.
Model FLOPs utilisation (MFU) is tokens per second times FLOP per token over the GPU's dense bf16 rate, for every precision.
FLOP per token is 6 N + 12 L C T for N parameters, L layers, C channels and T tokens in a sequence, as PaLM (appendix B) and
nanoGPT count.  That counts attention as if it were not causal, and does not count what is recomputed.
"""
import array
import collections
import csv
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import threading
import time

FORMULA = "(6 N + 12 L C T) tokens/s / dense bf16 rate"
# Dense bf16 TFLOP/s of the data sheets, by what a device's name holds; the first that fits.
RATES = [("H100 PCIe", 756), ("H100 NVL", 835), ("H100", 989.4), ("H200", 989.4), ("GH200", 989.4), ("B200", 2250),
         ("B300", 2250), ("A100", 311.9), ("A40", 149.7), ("A10", 125), ("L40S", 362), ("L4", 121), ("RTX 4090", 165.2), ("RTX 3090", 71)]
GPT2 = {"layers": 12, "heads": 12, "channels": 768, "vocab": 50304, "seq": 1024, "batch": 64, "few": 4}
TINY = {"layers": 2, "heads": 2, "channels": 64, "vocab": 512, "seq": 16, "batch": 2, "few": 1}
SEQUENCE = 1.2e9    # bytes of GPU memory for a sequence; amp.h takes 0.85e9 in fp32. PyTorch takes more there, and may have no row
CURVE, FEW = 100, 8 # steps of the loss curves; of everything in a rehearsal
Row = collections.namedtuple("Row", "name precision batch steps flags")


def model_for(device, rehearse):
    """GPT-2 124M with as many sequences, a power of two up to 64, as fit into the memory."""
    model = dict(TINY if rehearse else GPT2)
    while not rehearse and model["batch"] > 4 and model["batch"] * SEQUENCE > device.get("memory_bytes", 0):
        model["batch"] //= 2
    return model


def our_rows(model, rehearse):
    """By the name that chooses them; the name in the results is Row's."""
    few = model["few"]

    def row(name, precision, steps, *flags, size=model["batch"]):
        return Row(name, precision, size, FEW if rehearse else steps, list(flags))
    return {"bf16": row("bf16", "bf16", 30, "tuned"), "bf16-graph": row("bf16, graph", "bf16", 30, "tuned", "--graph"),
            "curve": row("curve", "bf16", CURVE, "tuned", "--log-interval", "1"),
            "bf16-few": row(f"bf16, B={few}", "bf16", 200, "tuned", size=few),
            "bf16-few-graph": row(f"bf16, B={few}, graph", "bf16", 200, "tuned", "--graph", size=few),
            "fp32": row("fp32", "fp32", 10, "tuned"), "fp16": row("fp16", "fp16", 30, "tuned"),
            "fp8-current": row("fp8, current", "fp8", 30, "tuned", "--fp8-scaling", "current"),
            "fp8-delayed": row("fp8, delayed", "fp8", 30, "tuned", "--fp8-scaling", "delayed"),
            "tf32": row("tf32", "tf32", 15, "tuned"), "profile": row("profile", "bf16", 10, "tuned", "--profile"),
            "bf16-recompute": row("bf16, recompute", "bf16", 20, "tuned", "--recompute"),
            "bf16-not-tuned": row("bf16, not tuned", "bf16", 20),
            "bf16-stream": row("bf16, bf16 stream", "bf16", 30, "tuned", "--activations", "auto,stream=bf16")}


def peer_run(model, rehearse, name):
    """What peer_step.py is asked: precision, mode, batch and steps of "bf16-few-compile"."""
    words = name.split("-")
    steps = {"bf16-compile": CURVE, "bf16-few-eager": 60, "bf16-few-compile": 60}.get(
        name, {"fp32": 9, "tf32": 20}.get(words[0], 24))
    run = f"{words[0]}:{words[-1]}:{model['few' if 'few' in words else 'batch']}:{FEW if rehearse else steps}"
    return run + (":profile" if name == "bf16-compile" else "")


# ---- What both train on

def write_tokens(path, count, classes):
    """16-bit tokens that can be learned in part: the frequent ones come often, and half of all follow from the one before."""
    if os.path.exists(path) and os.path.getsize(path) == 2 * count:
        return
    rng, follows = random.Random(1), bytearray(random.Random(2).randbytes(count))
    drawn = rng.choices(range(classes), cum_weights=list(itertools.accumulate(1 / (i + 2) for i in range(classes))), k=count)
    last = 0
    for i, byte in enumerate(follows):
        last = drawn[i] = (last * 40503 + 7) % classes if byte & 1 else drawn[i]
    with open(path, "wb") as f:
        array.array("H", drawn).tofile(f)


# ---- The GPU while it works

class Watch:
    """nvidia-smi's readings, five a second; medians between two times."""
    FIELDS = ("utilization.gpu", "memory.used", "power.draw", "clocks.sm")

    def __init__(self):
        self.rows, self.child = [], None
        if shutil.which("nvidia-smi") is None:
            return
        self.child = subprocess.Popen(["nvidia-smi", "--id=0", "--query-gpu=" + ",".join(self.FIELDS),
                                       "--format=csv,noheader,nounits", "-lms", "200"], stdout=subprocess.PIPE,
                                      stderr=subprocess.DEVNULL, text=True)
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        for text in self.child.stdout:
            try:
                self.rows.append((time.time(), [float(value) for value in text.split(",")]))
            except ValueError:                  # "[N/A]" where a GPU or a virtual machine does not say
                continue

    def close(self):
        if self.child:
            self.child.terminate()
            self.child.wait()

    def between(self, begin, end):
        rows = [values for at, values in self.rows if begin <= at <= end]
        if not rows:
            return {}

        def middle(i):
            return sorted(row[i] for row in rows)[len(rows) // 2]
        return {"utilization": middle(0) / 100, "used_mib": max(row[1] for row in rows), "power_w": middle(2),
                "clock_mhz": middle(3), "readings": len(rows)}


# ---- train_gpt

class Trainer:
    """runner: of the row under way."""
    def __init__(self, runner, model, folder, watch):
        self.runner, self.model, self.folder, self.watch = runner, model, folder, watch
        self.program = os.path.join(runner.bin, "train_gpt")
        self.init = os.path.join(folder, "init.safetensors")
        self.tokens = os.path.join(folder, "tokens.bin")

    def command(self, name, flags):
        m = self.model
        return [self.program, "--device", "cuda", "--data", self.tokens, "--format", "u16", "--seq", str(m["seq"]),
                "--heads", str(m["heads"]), "--shuffle", "off", "--sample", "0", "--eval-interval", "end",
                "--eval-batches", "1", "--validation", "1e-6", "--out", self.folder,
                "--metrics", os.path.join(self.folder, name + ".jsonl")] + flags

    def run(self, name, command, seconds, shown):
        """Runs a training: its records, what it printed, and between which times it wrote records."""
        path, log = os.path.join(self.folder, name + ".jsonl"), os.path.join(self.folder, name + ".log")
        for old in (path, log):
            if os.path.exists(old):
                os.remove(old)
        self.runner.shown(shown)
        end, size, times = time.time() + seconds, 0, []
        with open(log, "w") as out:
            child = subprocess.Popen(command, cwd=self.runner.root, env=self.runner.env, stdout=out, stderr=subprocess.STDOUT,
                                     start_new_session=True)
            while child.poll() is None and time.time() < end:
                time.sleep(0.05)
                now = os.path.getsize(path) if os.path.exists(path) else 0
                if now > size:
                    size, times = now, times + [time.time()]
            status = self.runner.wait(child, 1) if child.poll() is None else child.returncode
        with open(log) as f:
            text = f.read()
        if status != 0:
            last = (text.strip().splitlines() or ["no message"])[-1]
            why = f"stopped after {seconds:.0f} s" if status is None else f"ended with {status}: {last}"
            return self.runner.skip(f"{shown}: {why}")
        with open(path) as f:
            return [json.loads(record) for record in f], text, times

    def make_init(self):
        """The weights that all start from: those of a step that changes nothing."""
        m, flags = self.model, ["--lr", "0", "--steps", "1", "--precision", "fp32", "--batch", "1"]
        for name in ("vocab", "layers", "channels"):
            flags += ["--" + name, str(m[name])]
        command = self.command("init", flags + ["--save", os.path.join(self.folder, "init")])
        return self.run("init", command, 60, "train_gpt --steps 1 --lr 0 --save init") is not None

    def row(self, row, seconds):
        """One row's figures; None where it did not come to its end."""
        flags = ["--init", self.init, "--save", "none", "--precision", row.precision, "--batch", str(row.batch), "--steps",
                 str(row.steps), "--lr", "6e-4", "--warmup", "10", "--schedule", "constant", "--weight-decay", "0.1",
                 "--beta2", "0.95", "--eps", "1e-8", "--clip", "1"]
        own = [("--autotune=" + os.path.join(self.folder, "plans") if flag == "tuned" else flag) for flag in row.flags]
        own += [] if "--log-interval" in own else ["--log-interval", str(max(1, row.steps // 5))]
        own += ["--eval-interval", str(max(1, row.steps // 5))]     # each ends an epoch of the metrics; the first warms up
        own += ["--preset", "torch"] if row.precision == "fp16" else []
        name = re.sub(r"[^a-z0-9]+", "-", row.name.lower())
        shown = f"train_gpt --precision {row.precision} --batch {row.batch} --steps {row.steps} " + " ".join(
            "--autotune" if flag.startswith("--autotune") else flag for flag in own)
        found = self.run(name, self.command(name, flags + own), seconds, shown)
        return None if found is None else self.figures(row, *found)

    def figures(self, row, records, text, times):
        out = {"precision": row.precision, "batch": row.batch, "steps": row.steps}
        steps = [r for r in records if r["event"] == "step" and "loss" in r]
        out["tokens_per_s"] = rate([r for r in records if r["event"] == "epoch"][1:], row.batch * self.model["seq"])
        out["parameters"] = next((r["parameters"] for r in records if r["event"] == "run"), None)
        peak = re.search(r"^ *memory +([\d.]+) MiB at most", text, re.MULTILINE)
        out["peak_mib"] = float(peak.group(1)) if peak else None
        out["losses"] = {r["step"]: r["loss"] for r in steps}
        out["operators"] = [{k: v for k, v in r.items() if k != "event"} for r in records if r["event"] == "profile"]
        if len(times) > 1:
            out.update(self.watch.between(times[0], times[-1]))
        return out


def rate(epochs, tokens):
    """Tokens per second over these epochs, which validations end: their times hold none."""
    seconds = sum(r["seconds"] for r in epochs)
    return sum(r["steps"] for r in epochs) * tokens / seconds if seconds > 0 else None


def profile_kernels(trainer, row, seconds):
    """Our kernels' times by Nsight Compute, over two steps: the rows of peer_step.py's profile.  Slow, and every kernel runs
    alone, so only their proportions say something."""
    log = os.path.join(trainer.folder, "ncu.csv")
    if shutil.which("ncu") is None:
        return trainer.runner.skip("kernel times of train_gpt: ncu is not installed")
    steps = 2
    command = trainer.command("ncu", ["--init", trainer.init, "--save", "none", "--precision", row.precision, "--batch",
                                      str(row.batch), "--steps", str(steps)])
    command = ["ncu", "--csv", "--log-file", log, "--print-units", "base", "--clock-control", "none", "--metrics",
               "gpu__time_duration.sum"] + command
    if trainer.run("ncu", command, seconds, "ncu --metrics gpu__time_duration.sum train_gpt --steps 2") is None:
        return None
    found = collections.defaultdict(lambda: [0.0, 0])
    with open(log) as f:
        lines = [text for text in f if text.startswith('"')]
    for record in csv.DictReader(lines):
        entry = found[record["Kernel Name"][:100]]
        entry[0] += float(record["Metric Value"].replace(",", "")) / 1e6
        entry[1] += 1
    rows = [[name, round(ms / steps, 4), count // steps] for name, (ms, count) in found.items()]
    return sorted(rows, key=lambda entry: -entry[1])[:30]


# ---- Both

class Steps:
    """The rows of both programs; what they share is made with the first."""
    def __init__(self, session, whole):
        self.session, self.whole = session, whole
        self.model = model_for(whole["device"], session.args.rehearse)
        self.rows = our_rows(self.model, session.args.rehearse)
        folder = os.path.join(session.bin, "step")
        os.makedirs(folder, exist_ok=True)
        self.watch = session.watch
        self.trainer = Trainer(session, self.model, folder, self.watch)
        self.ready = False
        if not whole["step"]:
            whole["step"] = {"model": self.model, "formula": FORMULA, "rows": collections.OrderedDict(), "torch": None, "profile": {},
                             "peers": {}}
        whole["step"].setdefault("peers", {})

    def prepare(self):
        """What both train on, and the weights they start from."""
        trainer, sequences = self.trainer, (CURVE + 5) * self.model["batch"]    # the profile takes some steps more
        write_tokens(trainer.tokens, (sequences + 2) * self.model["seq"], self.model["vocab"] - 47)
        self.ready = trainer.make_init()

    def do(self, runner, part, name):
        """One row of ours, or of PyTorch's.  Where no row has prepared them yet, that is not of this row's time."""
        trainer, began = self.trainer, time.time()
        trainer.runner = runner
        if not self.ready:
            self.prepare()
            runner.extend(time.time() - began)
        if not self.ready or name == "init":
            return
        if part == "peer":
            self.peer(runner, name)
        elif name == "ncu":
            self.whole["step"]["profile"]["amp.h kernels"] = profile_kernels(trainer, self.rows["bf16"], runner.left() - 2)
        else:
            self.ours(runner, name)
        collect(self.whole["step"], self.rows)
        utilisation(self.whole["step"], self.whole["device"])

    def ours(self, runner, name):
        row, step = self.rows[name], self.whole["step"]
        found = self.trainer.row(row, runner.left())
        if found is None:
            return
        operators = found.pop("operators")
        found["cublas"] = self.whole["device"].get("cublas")
        if name == "profile":
            step["profile"]["amp.h operators"] = operators
        elif name == "curve":
            step["curve"] = [found["losses"][k] for k in sorted(found["losses"])]
        else:
            found.pop("losses")
            step["rows"][row.name] = found

    def peer(self, runner, name):
        """PyTorch's program runs on from run to run."""
        step, run = self.whole["step"], peer_run(self.model, self.session.args.rehearse, name)
        flags = ["--heads", str(self.model["heads"]), "--seq", str(self.model["seq"])]
        flags += ["--device", "cpu"] if self.session.args.rehearse else []
        command = [runner.python, os.path.join(os.path.dirname(__file__), "peer_step.py"), "--tokens", self.trainer.tokens,
                   "--init", self.trainer.init] + flags
        runner.shown("$PEER_TORCH tests/gpu/peer_step.py " + " ".join(flags) + " < " + run)
        talk = self.session.talk("peer_step", command)
        talk.tell(run)
        record = {}
        while record is not None and record.get("event") != "run":
            record = talk.hear(runner.left())
            if record and record["event"] == "versions":
                step["torch"] = record["torch"]
                self.session.torch = getattr(self.session, "torch", None) or record
        if record is None or "skipped" in record:
            return runner.skip(f"PyTorch, {run}: " + (record["skipped"] if record else (talk.messages() or ["no answer in time"])[-1]))
        kept = {k: v for k, v in record.items() if k not in ("event", "begin", "end")}
        kept.update(self.watch.between(record["begin"], record["end"]))
        if kept.get("kernels"):
            step["profile"]["torch kernels"] = kept.pop("kernels")
        step["peers"][":".join(run.split(":")[:3])] = kept


def attach(row, ours, theirs):
    """PyTorch's figures beside a row of ours, and how many times as fast ours is."""
    for record in theirs.values():
        if (record["precision"], record["batch"]) != (row.precision, row.batch):
            continue
        kept = {k: v for k, v in record.items() if k not in ("losses", "parameters", "steps", "batch", "precision", "mode")}
        if kept.get("tokens_per_s") and ours.get("tokens_per_s"):
            kept["ratio"] = round(ours["tokens_per_s"] / kept["tokens_per_s"], 3)
        ours.setdefault("peers", collections.OrderedDict())[record["mode"]] = kept


def collect(step, rows):
    """PyTorch's figures beside all rows that are there, and the losses of both."""
    for row in rows.values():
        if row.name in step["rows"]:
            attach(row, step["rows"][row.name], step["peers"])
    compiled = step["peers"].get(f"bf16:compile:{step['model']['batch']}", {})
    if step.get("curve") and compiled.get("losses"):
        step["curves"] = curves(step["curve"], compiled)


def curves(mine, theirs):
    """The losses of both, step by step, and how far they are apart."""
    gaps = [abs(a - b) for a, b in zip(mine, theirs["losses"])]
    return {"amp.h": mine, "torch": theirs["losses"][:len(mine)], "largest_difference": max(gaps), "mean_difference":
            sum(gaps) / len(gaps), "last_ten_difference": abs(sum(mine[-10:]) - sum(theirs["losses"][:len(mine)][-10:])) / 10}


def utilisation(whole, device):
    """MFU of every row, ours and theirs."""
    peak = next((tflops for name, tflops in RATES if re.search(rf"\b{name}\b", device["name"])), None)
    parameters = next((row["parameters"] for row in whole["rows"].values() if row.get("parameters")), None)
    if parameters is None:
        return
    m = whole["model"]
    flop = 6 * parameters + 12 * m["layers"] * m["channels"] * m["seq"]
    whole.update(parameters=parameters, flop_per_token=flop, dense_bf16_tflop_per_s=peak)
    for row in whole["rows"].values():
        for one in [row] + list(row.get("peers", {}).values()):
            if one.get("tokens_per_s"):
                one["step_ms"] = round(1e3 * row["batch"] * m["seq"] / one["tokens_per_s"], 3)
                one["mfu"] = round(one["tokens_per_s"] * flop / peak * 1e-12, 4) if peak else None
                one["tokens_per_s"] = round(one["tokens_per_s"], 1)


# ---- Bars and the table

def bars(whole, verdict):
    """What the whole step must reach; whole {}: nothing was measured."""
    rows, model = whole.get("rows", {}), whole.get("model", GPT2)
    few, why = f"bf16, B={model['few']}, graph", "make gpu ROWS=step" if not whole else "no result"

    def of(name, key):
        return rows.get(name, {}).get(key)

    def best(key):
        return max([of(name, key) or 0 for name in ("bf16", "bf16, graph")]) or None

    def ratio(a, b):
        return round(a / b, 3) if a and b else None

    def peer(name, mode):
        return rows.get(name, {}).get("peers", {}).get(mode, {}).get("tokens_per_s")
    eager = peer(few, "eager")
    full = model["batch"] == GPT2["batch"]
    memory = ratio(of("bf16", "peak_mib"), of("fp32", "peak_mib"))
    return [verdict("step: tokens/s in bf16, B=64", "at least 500000", best("tokens_per_s") if full else None, why, 5e5),
            verdict("step: bf16 over torch.compile", "at least 1", ratio(best("tokens_per_s"), peer("bf16", "compile")), why, 1),
            verdict("step: B=4 with graph over eager PyTorch", "at least 2", ratio(of(few, "tokens_per_s"), eager), why, 2),
            verdict("step: bf16 over fp32", "at least 2.5", ratio(best("tokens_per_s"), of("fp32", "tokens_per_s")), why, 2.5),
            verdict("step: memory of fp32 over bf16", "at least 1.724 (bf16 at most 0.58)", ratio(1, memory), why, 1 / 0.58)]


def cell(value, form):
    return "-" if value is None else format(value, form)


def show(whole):
    """A line per row and program."""
    m = whole["model"]
    print(f"\nGPT-2, {m['layers']} layers, {m['channels']} channels, B={m['batch']} T={m['seq']}; MFU = {whole['formula']}, "
          f"{cell(whole.get('dense_bf16_tflop_per_s'), 'g')} TFLOP/s")
    print(f"{'row':24s} {'program':14s} {'tokens/s':>10s} {'step ms':>9s} {'MFU':>6s} {'peak MiB':>9s} {'GPU busy':>8s} "
          f"{'amp.h is':>8s}")
    for name, row in whole["rows"].items():
        lines = [("amp.h", row)] + [("torch " + mode, one) for mode, one in row.get("peers", {}).items()]
        for program, one in lines:
            times = f"{one['ratio']:.2f}x" if one.get("ratio") else ""
            print(f"{name:24s} {program:14s} {cell(one.get('tokens_per_s'), ',.0f'):>10s} {cell(one.get('step_ms'), '.2f'):>9s} "
                  f"{cell(one.get('mfu'), '.1%'):>6s} {cell(one.get('peak_mib'), ',.0f'):>9s} "
                  f"{cell(one.get('utilization'), '.0%'):>8s} {times:>8s}"
                  + (f"  {one['skipped']}" if one.get("skipped") else ""))
    if whole.get("curves"):
        c = whole["curves"]
        print(f"losses over {len(c['amp.h'])} steps: amp.h {c['amp.h'][0]:.4f} to {c['amp.h'][-1]:.4f}, torch "
              f"{c['torch'][0]:.4f} to {c['torch'][-1]:.4f}; at most {c['largest_difference']:.2g} apart, {c['mean_difference']:.2g} on average")
    for title, rows in whole["profile"].items():
        if rows:
            print(f"\nwhere the time goes, {title}, ms per step")
        for one in (rows or [])[:12]:
            if isinstance(one, dict):
                print(f"  {one['operator']:40s} {one['forward_ms'] + one['backward_ms']:9.3f}  {one['share']:.1%}")
            else:
                print(f"  {one[0][:70]:70s} {one[1]:9.3f}  x {one[2]}")
