"""Measures what compiling amp.h costs: CPU seconds, the compiler's passes, and the machine code of each section.

    python3 tests/bench/compile_time.py [--rounds 3] [--peer HEADER --macro NAME_IMPLEMENTATION]

It compiles in turn the whole implementation, the implementation without its parts (AMP_NO_CARE and the others), and a
peer's single header.  It reads gcc's -ftime-report.  It also gives the bytes of machine code by section and instruction
set, because the time of the passes grows with them.  Writes tests/bench/results/compile-CPU-DATE.json.
"""
import argparse
import bisect
import collections
import datetime
import json
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__))]
import run                                                      # noqa: E402

LEAN = ["-DAMP_NO_CARE", "-DAMP_NO_WATCH"]
PARTS = ["OPERATORS", "OPTIMIZERS", "TAPE", "RANKS", "VECTOR", "FP8", "CARE", "WATCH"]
SMALLEST = [f"-DAMP_NO_{part}" for part in ("OPERATORS", "OPTIMIZERS", "VECTOR", "FP8")]
SETS = ("scalar", "avx2", "avx512")


def compile_once(cc, flags, header, macro, out):
    """CPU seconds of one compilation, and what the compiler wrote to stderr."""
    source = f'#define {macro}\n#include "{os.path.abspath(header)}"\n'
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([cc, *flags, "-w", "-x", "c", "-c", "-", "-o", out], input=source, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stderr


def passes(report):
    """Share of the user time of each phase and of the most expensive passes."""
    rows = [(m[1].strip(), float(m[2])) for m in re.finditer(r"^ *(.+?) *: *([0-9.]+) \(", report, re.M)]
    total = float(re.search(r"^ *TOTAL *: *([0-9.]+)", report, re.M)[1])
    phases = {name: round(s / total, 3) for name, s in rows if name.startswith("phase ") or name.startswith("callgraph ")}
    rest = sorted(((s, name) for name, s in rows if name not in phases and name[0] not in "`|"), reverse=True)
    return total, {k: v for k, v in phases.items() if v >= 0.005}, {name: round(s / total, 3) for s, name in rest[:14]}


def sections():
    """The line each section of amp.h begins in, and its name."""
    begins, names = [0], ["declarations"]
    with open(os.path.join(run.ROOT, "amp.h")) as f:
        for i, line in enumerate(f, 1):
            m = re.match(r"/\* ==== \d+ >>(\w+): (implementation|vector kernels)", line)
            if m:
                begins.append(i)
                names.append(m[1] + (", vector kernels" if m[2] != "implementation" else ""))
    return begins, names


def machine_code(cc, out):
    """Functions and bytes of machine code, by section and instruction set."""
    compile_once(cc, ["-O2", "-g1"], os.path.join(run.ROOT, "amp.h"), "AMP_IMPLEMENTATION", out)
    begins, names = sections()
    found = collections.defaultdict(lambda: [0, 0])
    for line in subprocess.run(["nm", "-S", "-l", out], capture_output=True, text=True, check=True).stdout.splitlines():
        m = re.match(r"\w+ (\w+) [tT] (\S+)\t.*amp\.h:(\d+)", line)
        if not m:
            continue
        which = next((s for s in reversed(SETS) if f"_{s}" in m[2]), "any")
        row = found[names[bisect.bisect(begins, int(m[3])) - 1], which]
        row[0] += 1
        row[1] += int(m[1], 16)
    return [collections.OrderedDict(section=s, instructions=i, functions=n, bytes=b) for (s, i), (n, b) in sorted(found.items())]


def object_bytes(out):
    """Bytes of code and constants of an object."""
    text, data = subprocess.run(["size", out], capture_output=True, text=True, check=True).stdout.splitlines()[1].split()[:2]
    return int(text) + int(data)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cc", default="gcc")
    parser.add_argument("--peer", help="another single header")
    parser.add_argument("--macro", help="what makes it an implementation")
    parser.add_argument("--out", default="tests/bench/results", help="folder for the JSON file")
    args = parser.parse_args()
    args.threads, args.wait, args.bin = 1, 0, "build"
    machine = run.Machine(args)
    amp = os.path.join(run.ROOT, "amp.h")
    cases = {"amp.h": (["-O2"], amp, "AMP_IMPLEMENTATION"), "amp.h without care and watch": (["-O2", *LEAN], amp, "AMP_IMPLEMENTATION"),
             **{f"without {part.lower()}": (["-O2", f"-DAMP_NO_{part}"], amp, "AMP_IMPLEMENTATION") for part in PARTS},
             "the scaler, the choice, loaders and states": (["-O2", *SMALLEST], amp, "AMP_IMPLEMENTATION"),
             "amp.h, -O1": (["-O1"], amp, "AMP_IMPLEMENTATION"), "amp.h, -O0": (["-O0"], amp, "AMP_IMPLEMENTATION")}
    if args.peer:
        cases[os.path.basename(args.peer)] = (["-O2"], args.peer, args.macro)
    seconds, size = {name: [] for name in cases}, {}
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "x.o")
        for _ in range(args.rounds):
            for name, (flags, header, macro) in cases.items():
                seconds[name].append(compile_once(args.cc, flags, header, macro, out)[0])
                size[name] = object_bytes(out)
        total, phases, most = passes(compile_once(args.cc, ["-O2", "-ftime-report"], amp, "AMP_IMPLEMENTATION", out)[1])
        code = machine_code(args.cc, out)
    about, now = run.describe_machine(machine, {}), datetime.datetime.now(datetime.timezone.utc)
    about.pop("used_by_others")                                 # CPU seconds, and nothing measured it here
    peer = statistics.median(seconds[os.path.basename(args.peer)]) if args.peer else None
    rows = [collections.OrderedDict(compiled=name, cpu_seconds=round(statistics.median(s), 2), bytes=size[name],
                                    over_peer=round(statistics.median(s) / peer, 2) if peer else None) for name, s in seconds.items()]
    whole = collections.OrderedDict(date=now.strftime("%Y-%m-%d %H:%M UTC"), machine=about, command="python3 " + " ".join(
        ["tests/bench/compile_time.py"] + (["--peer", os.path.basename(args.peer), "--macro", args.macro] if args.peer else [])),
        compiler=subprocess.run([args.cc, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0],
        rounds=args.rounds, rows=rows, report_seconds=total, phases=phases, passes=most, machine_code=code)
    path = os.path.join(args.out, f"compile-{run.short_name(about['cpu'])}-{now.strftime('%Y-%m-%d')}.json")
    text = re.sub(r"\{\s+(\"(?:section|compiled)\"[^}]*?)\s+\}", lambda row: "{" + re.sub(r"\s+", " ", row[1]) + "}", json.dumps(whole, indent=1))
    with open(os.path.join(run.ROOT, path), "w") as f:
        f.write(text + "\n")
    for row in rows:
        print(f"{row['compiled']:44} {row['cpu_seconds']:6.2f} s {row['bytes']:9,d} bytes {row['over_peer'] or ''}")
    by = collections.Counter()
    for row in code:
        by[row["section"], row["instructions"]] += row["bytes"]
    for (section, which), size in by.most_common():
        print(f"{section:32} {which:8} {size:8,d} bytes  {size / sum(by.values()):.1%}")
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
