"""Runs train_gpt for moments.py, fp8_curves.py and precision_curves.py, and keeps the runs so that they are not repeated."""
import datetime
import hashlib
import json
import os
import re
import subprocess

import run

ROOT = run.ROOT
FOLDER = os.path.join(ROOT, "out/training")


def digest(path):
    with open(path, "rb") as f:
        return "sha256 " + hashlib.sha256(f.read()).hexdigest()[:16]


def program(*flags):
    subprocess.run([os.path.join(ROOT, "build/train_gpt"), "--save", "none", "--sample", "0", *map(str, flags)],
                   check=True, stdout=subprocess.DEVNULL, cwd=ROOT)


def text():
    """The project's own text as it was at the first run: later changes of the project do not change it."""
    path = os.path.join(FOLDER, "corpus.txt")
    if not os.path.exists(path):
        program("--out", FOLDER, "--steps", 0, "--metrics", "none")
    return path


def finished(path, steps):
    """The records of a run that came to its last step, with which amp.h trained it; else None."""
    if not os.path.exists(path):
        return None
    with open(path) as f:
        rows = [json.loads(line) for line in f]
    ends = [r for r in rows if r["event"] == "validation" and r["step"] == steps]
    return {"amp.h": rows[-1].get("amp.h"), "loss": ends[-1]["loss"],
            "steps": {r["step"]: r["loss"] for r in rows if r["event"] == "step"}} if ends and "amp.h" in rows[-1] else None


def train(name, steps, *flags):
    """Trains, unless out/training has that run from its first step to its last."""
    path = os.path.join(FOLDER, name + ".jsonl")
    if finished(path, steps) is None:
        amp_h, data = digest(os.path.join(ROOT, "amp.h")), text()
        program("--out", FOLDER, "--data", data, "--steps", steps, "--eval-interval", steps, "--metrics", path + ".now", *flags)
        with open(path + ".now", "a") as f:
            f.write(json.dumps({"event": "end", "amp.h": amp_h}) + "\n")
        os.replace(path + ".now", path)
    return finished(path, steps)


def write(kind, versions, **parts):
    """Into tests/bench/results/KIND-CPU-DATE.json; a run, which begins with its recipe, to a line."""
    now = datetime.datetime.now(datetime.timezone.utc)
    name = f"{kind}-{run.short_name(run.cpu_name())}-{now.strftime('%Y-%m-%d')}.json"
    whole = {"date": now.strftime("%Y-%m-%d %H:%M UTC"),
             "machine": {"cpu": run.cpu_name(), "cores": len(os.sched_getaffinity(0)), "load": os.getloadavg()[0]},
             "versions": versions, **parts}
    with open(os.path.join(ROOT, "tests/bench/results", name), "w") as f:
        f.write(re.sub(r'\{\s+("recipe"[^}]*?)\s+\}', lambda row: "{" + re.sub(r"\s+", " ", row[1]) + "}",
                       json.dumps(whole, indent=1)) + "\n")
    return name
