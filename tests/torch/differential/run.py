"""run.py - runs one part of `make differential`: it makes a corpus, replays it, and records the results.

    python tests/torch/differential/run.py SEED PART PROGRAM      (from the project root)

tests/torch/oracle/fuzz_PART.py --seed SEED --out build/fuzz_PART.corpus writes the corpus.  PROGRAM build/fuzz_PART.corpus
replays it.  Lines "counted NAME NUMBER" and "listed TEXT" of either are written to
tests/records/differential_PART-DATE.json.
"""
import datetime
import json
import os
import platform
import subprocess
import sys
import time


def run(command, counts, listed):
    """Runs and shows a command, collects what it counted and listed; (exit status, seconds, last line)."""
    start, last = time.time(), ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            words, last = line.split(), line.strip()
            if len(words) == 3 and words[0] == "counted":
                counts[words[1]] = json.loads(words[2])
            if words[:1] == ["listed"]:
                listed.append(last.removeprefix("listed "))
    return process.returncode, round(time.time() - start, 1), last


def cpu_model():
    if os.path.exists("/proc/cpuinfo"):
        for line in open("/proc/cpuinfo"):
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write_record(part, seed, counts, listed, seconds, result, passed, corpus_bytes=0):
    compiler = subprocess.run([os.environ.get("CC", "cc"), "--version"], capture_output=True, text=True).stdout
    import torch
    record = {"command": f"make differential SEED={seed}", "part": part, "seed": seed, "pytorch": torch.__version__,
              "compiler": compiler.splitlines()[0] if compiler else "unknown", "cpu": cpu_model(),
              "corpus_bytes": corpus_bytes, "counts": counts, "listed": listed, "seconds": seconds, "result": result,
              "passed": passed}
    path = f"tests/records/differential_{part}-{datetime.date.today()}.json"
    os.makedirs("tests/records", exist_ok=True)
    with open(path, "w") as f:
        json.dump(record, f, indent=2)
        f.write("\n")
    print(f"{path}: {result}")


def main():
    seed, part, program = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    corpus, counts, listed = f"build/fuzz_{part}.corpus", {}, []
    oracle = [sys.executable, f"tests/torch/oracle/fuzz_{part}.py", "--seed", str(seed), "--out", corpus]
    status, made, last = run(oracle, counts, listed)
    replayed = 0.0
    if status == 0:
        status, replayed, last = run([program, corpus], counts, listed)
    write_record(part, seed, counts, listed, {"oracle": made, "replay": replayed}, last, status == 0,
                 os.path.getsize(corpus) if os.path.exists(corpus) else 0)
    sys.exit(status)


if __name__ == "__main__":
    main()
