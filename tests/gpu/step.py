"""Whole training steps: train_gpt on the GPU beside PyTorch (peer_step.py), from the same weights on the same tokens.

For run.py: measure() trains and returns what the results keep, bars() rates it, show() prints it.  Model FLOPs utilisation
(MFU) is tokens per second times FLOP per token over the GPU's dense bf16 rate, whatever the precision;
FLOP per token = 6 N + 12 L C T for N parameters, L layers, C channels and T tokens in a sequence, as PaLM (appendix B) and
nanoGPT count: attention as if it were not causal, and nothing of what is recomputed.
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
    """In the order of their weight; what the time does not suffice for comes last."""
    batch, few = model["batch"], model["few"]

    def row(name, precision, steps, *flags, size=batch):
        return Row(name, precision, size, FEW if rehearse else steps, list(flags))
    first = [row("bf16", "bf16", 30, "tuned"), row("bf16, graph", "bf16", 30, "tuned", "--graph"),
             row("curve", "bf16", CURVE, "tuned", "--log-interval", "1")]
    rest = [row(f"bf16, B={few}", "bf16", 200, "tuned", size=few),
            row(f"bf16, B={few}, graph", "bf16", 200, "tuned", "--graph", size=few),
            row("fp32", "fp32", 10, "tuned"), row("fp16", "fp16", 30, "tuned"), row("tf32", "tf32", 15, "tuned"),
            row("profile", "bf16", 10, "tuned", "--profile"), row("bf16, recompute", "bf16", 20, "tuned", "--recompute"),
            row("bf16, not tuned", "bf16", 20)]
    return first, rest


def peer_runs(model, rehearse):
    b, few = model["batch"], model["few"]
    if rehearse:
        return [f"bf16:compile:{b}:{FEW}:profile", f"bf16:eager:{b}:{FEW}", f"bf16:eager:{few}:{FEW}"], [f"fp32:eager:{b}:{FEW}"]
    return ([f"bf16:compile:{b}:{CURVE}:profile", f"bf16:eager:{b}:24", f"bf16:eager:{few}:60"],
            [f"fp16:eager:{b}:24", f"tf32:eager:{b}:20", f"fp32:eager:{b}:9", f"fp16:compile:{b}:30", f"fp32:compile:{b}:9",
             f"tf32:compile:{b}:20", f"bf16:compile:{few}:60"])


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

def peers(runner, model, trainer, watch, runs, seconds):
    """What peer_step.py says of each run, by (precision, mode, batch), and PyTorch's version."""
    flags = ["--heads", str(model["heads"]), "--seq", str(model["seq"])] + (["--device", "cpu"] if runner.args.rehearse else [])
    command = [runner.python, os.path.join(os.path.dirname(__file__), "peer_step.py"), "--tokens", trainer.tokens, "--init",
               trainer.init, "--seconds", f"{seconds:.0f}"] + flags + runs
    found = runner.lines("$PEER_TORCH tests/gpu/peer_step.py " + " ".join(flags + runs), command, seconds + 10)
    torch, out = None, {}
    for record in found:
        if record["event"] == "versions":
            torch = record["torch"]
        if record["event"] == "run":
            key = (record["precision"], record["mode"], record["batch"])
            out[key] = {k: v for k, v in record.items() if k not in ("event", "begin", "end", "precision", "mode")}
            if "begin" in record:
                out[key].update(watch.between(record["begin"], record["end"]))
    return out, torch


def attach(row, ours, theirs):
    """PyTorch's figures beside a row of ours, and how many times as fast ours is."""
    for (precision, mode, batch), record in theirs.items():
        if (precision, batch) != (row.precision, row.batch) or row.name == "profile":
            continue
        kept = {k: v for k, v in record.items() if k not in ("losses", "kernels", "parameters", "steps", "batch")}
        if kept.get("tokens_per_s") and ours.get("tokens_per_s"):
            kept["ratio"] = round(ours["tokens_per_s"] / kept["tokens_per_s"], 3)
        ours.setdefault("peers", collections.OrderedDict())[mode] = kept


def curves(ours, theirs):
    """The losses of both, step by step, and how far they are apart."""
    mine = [ours["losses"][step] for step in sorted(ours["losses"])]
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


def measure(runner, device):
    model, rehearse = model_for(device, runner.args.rehearse), runner.args.rehearse
    folder = os.path.join(runner.bin, "step")
    os.makedirs(folder, exist_ok=True)
    watch = Watch()
    trainer = Trainer(runner, model, folder, watch)
    whole = {"model": model, "formula": FORMULA, "rows": collections.OrderedDict(), "torch": None, "profile": {}}
    sequences = (CURVE + 5) * model["batch"]            # the profile takes some steps more
    write_tokens(trainer.tokens, (sequences + 2) * model["seq"], model["vocab"] - 47)
    first, rest = our_rows(model, rehearse)
    first_runs, rest_runs = peer_runs(model, rehearse)
    theirs, done = {}, []

    def ours(rows, spare):
        for row in rows:
            if runner.left() - spare < 15:
                runner.skip(f"train_gpt, {row.name}: no time left")
                continue
            found = trainer.row(row, min(150, runner.left() - spare))
            if found:
                done.append((row, found))

    def pytorch(runs, spare):
        found, torch = peers(runner, model, trainer, watch, runs, max(1, runner.left() - spare))
        theirs.update(found)
        whole["torch"] = torch or whole["torch"]
    try:
        if trainer.make_init():
            ours(first, 0)
            pytorch(first_runs, 0.5 * runner.left())
            ours(rest, 0.4 * runner.left())
            pytorch(rest_runs, 0.1 * runner.left())
            if not rehearse and runner.left() > 30:
                whole["profile"]["amp.h kernels"] = profile_kernels(trainer, first[0], runner.left() - 5)
    finally:
        watch.close()
    collect(whole, done, theirs)
    utilisation(whole, device)
    return whole


def collect(whole, done, theirs):
    compiled = theirs.get(("bf16", "compile", whole["model"]["batch"]), {})
    for row, found in done:
        operators = found.pop("operators")
        if row.name == "curve" and compiled.get("losses"):
            whole["curves"] = curves(found, compiled)
        if row.name == "profile":
            whole["profile"]["amp.h operators"] = operators
        if row.name in ("curve", "profile"):
            continue
        attach(row, found, theirs)
        found.pop("losses")
        whole["rows"][row.name] = found
    if compiled.get("kernels"):
        whole["profile"]["torch kernels"] = compiled["kernels"]


# ---- Bars and the table

def bars(whole, verdict):
    """What the whole step must reach; whole {}: nothing was measured."""
    rows, model = whole.get("rows", {}), whole.get("model", GPT2)
    few, why = f"bf16, B={model['few']}, graph", "make gpu PART=step" if not whole else "no result"

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
