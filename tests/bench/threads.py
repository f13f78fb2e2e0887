"""Rates the thread pool: its speed against one thread's, and against an amp.h that used OpenMP.

    python3 tests/bench/threads.py [--peer COMMIT] [--runs 21] [--only alone,neighbours,threads] [--wait 0]

It is measured alone, beside programs that need the cores too, and with more threads than cores.  `make bench-threads
PEER=COMMIT` calls it.  COMMIT is one whose amp.h used OpenMP, and the same program is built against it.  Without it, those
rows are skipped.  Every run is a process of its own, and the contestants of a row run in turn.  A ratio is the median over
the runs of neighbours' times.  cpu is the CPU time of a call over all threads together.  It is printed and saved beside the
wall time.  Neighbours are loops that only compute, one per core.  One of them computes and sleeps for 20 ms in turn.
Writes tests/bench/results/threads-CPU-DATE.json.
"""
import argparse
import collections
import contextlib
import datetime
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__))]
import run                                                      # noqa: E402

ROOT = run.ROOT
FLAGS = ["-std=c99", "-D_GNU_SOURCE", "-O2", "-w"]
PROGRAM = "tests/bench/bench_threads.c"
PRODUCTS = (20, 40, 100)                                        # microseconds on one thread
NEIGHBOURS = {"one neighbour": [[]], "two neighbours": [[], []], "one that comes and goes": [["--off", "20"]]}


def build(folder, out, *flags):
    subprocess.run(["gcc", *FLAGS, *flags, PROGRAM, "-o", out, "-lm", "-lpthread"], cwd=folder, check=True)
    with open(os.path.join(folder, "amp.h"), "rb") as f:
        return "sha256 " + hashlib.sha256(f.read()).hexdigest()[:16]


def build_peer(commit, work):
    """The same program against that commit's amp.h."""
    tree = os.path.join(work, "tree")
    os.mkdir(tree)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
    with open(os.path.join(ROOT, PROGRAM), "rb") as now, open(os.path.join(tree, PROGRAM), "wb") as there:
        there.write(now.read())
    return build(tree, os.path.join(work, "openmp"), "-fopenmp")


class Bench:
    """Programs by their name, and what was measured with them."""

    def __init__(self, args, work):
        self.args, self.work, self.machine, self.rows = args, work, run.Machine(args), []
        self.commands = collections.OrderedDict()
        # Nothing that the user set for OpenMP; what it does by itself is what is compared.
        self.env = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}

    def once(self, program, flags):
        command = [str(flag) for flag in flags]
        self.commands[" ".join([program] + command)] = None
        done = subprocess.run([os.path.join(self.work, program)] + command, env=self.env, stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, text=True, timeout=600)
        if done.returncode != 0:
            raise run.Skip(run.without_paths((done.stderr.strip().splitlines() or ["no message"])[-1]))
        self.machine.line = json.loads(done.stdout)
        return self.machine.line

    def alone(self, measure):
        """measure(), and what other programs used meanwhile goes into the results; --wait waits for quiet first."""
        if self.args.wait > 0:
            return self.machine.quiet(measure)
        line, busy = self.machine.others(measure)
        self.machine.busy.append(round(busy, 3))
        return line

    def product_size(self, us):
        """Rows of squares whose product takes one thread about so long: a multiple of 16."""
        size = 128
        for _ in range(3):
            took = min(self.once("own", ["--work", "product", "--size", size, "--threads", 1, "--run", 50])["cpu_us_per_call"]
                       for _ in range(3))
            size = max(32, 16 * round(size * (us / took) ** (1 / 3) / 16))
        return size

    @contextlib.contextmanager
    def neighbours(self, which):
        programs = [subprocess.Popen([os.path.join(self.work, "own"), "--work", "spin", *flags]) for flags in which]
        try:
            yield
        finally:
            for program in programs:
                program.kill()
                program.wait()

    def row(self, part, name, flags, contestants, beside=()):
        """Runs the contestants, {name: (program, threads)}, in turn."""
        if self.args.works and name not in self.args.works.split(","):
            return
        took, cpu = ({c: [] for c in contestants} for _ in range(2))
        names = list(contestants)
        with self.neighbours(beside):
            for number in range(self.args.runs):
                turn = number % len(names)
                for c in names[turn:] + names[:turn]:
                    program, threads = contestants[c]
                    measure = lambda: self.once(program, flags + ["--threads", threads])    # noqa: E731
                    line = measure() if beside else self.alone(measure)
                    took[c].append(line["us_per_call"])
                    cpu[c].append(line["cpu_us_per_call"])
        row = collections.OrderedDict(part=part, work=name, flags=" ".join(map(str, flags)))
        if part == "alone":
            row["used_by_others"] = statistics.median(self.machine.busy[-len(names) * self.args.runs:])
        for c in names:
            row[c] = {"us": round(statistics.median(took[c]), 2), "cpu_us": round(statistics.median(cpu[c]), 2),
                      "runs_us": [round(t, 2) for t in took[c]]}
            if c != names[0]:
                row["speed over " + c] = round(statistics.median(b / a for a, b in zip(took[names[0]], took[c])), 4)
        self.rows.append(row)
        print(f"{part:24s} {name:12s} " + "  ".join(f"{c} {row[c]['us']:.1f} us, cpu {row[c]['cpu_us']:.1f}" for c in names) +
              "  " + "  ".join(f"{key[6:]}: {value:.3f}" for key, value in row.items() if key.startswith("speed")), flush=True)


def measure(bench, peer):
    args, contestants = bench.args, {"pool": ("own", 2), "one thread": ("own", 1)}
    if peer:
        contestants["OpenMP"] = ("openmp", 2)
    products = {f"product {us} us": ["--work", "product", "--size", bench.product_size(us)] for us in PRODUCTS}
    short = ["--run", args.run]
    long = ["--run", args.run_beside, "--warmup", 150]
    if "alone" in args.only:
        works = {"GEMM 1024": ["--work", "product", "--size", 1024], "attention": ["--work", "attention", "--size", 256],
                 "step 11M": ["--work", "step_11m"], **products}
        for name, flags in works.items():
            bench.row("alone", name, flags + short, contestants)
        bench.row("alone", "step 124M", ["--work", "step_124m", "--warmup", 0, "--run", 100],
                  {c: v for c, v in contestants.items() if c != "one thread" or not peer})
    works = {"small step": ["--work", "step_small"], "MLP, loader": ["--work", "mlp"], "product 40 us": products["product 40 us"]}
    for part, beside in NEIGHBOURS.items():
        for name, flags in works.items():
            if "neighbours" in args.only:
                bench.row(part, name, flags + long, contestants, beside)
    for name, flags in works.items():
        if "threads" in args.only:
            bench.row("more threads", name, flags + short, {"pool": ("own", 2), "4 threads": ("own", 4), "16 threads": ("own", 16)})


def bars(rows):
    """Of a row the pool's speed over the others'; with more threads theirs over the pool's two."""
    def of(row, key):
        def value():
            if key not in row:
                raise run.Skip("no peer: PEER names no commit")
            if row.get("used_by_others", 0) > run.QUIET:
                raise run.Skip(f"other programs used {row['used_by_others']:.0%} of the machine")
            return row[key]
        return value
    out = []
    for row in rows:
        name = f"{row['part']}: {row['work']}"
        if row["part"] == "more threads":
            out += [run.verdict(f"{name}: {n} threads, times 2", 0.9, lambda n=n: 1 / row[f"speed over {n} threads"]) for n in (4, 16)]
            continue
        if row["part"] != "alone":
            out.append(run.verdict(f"{name}: times one thread", 0.97, of(row, "speed over one thread")))
        out.append(run.verdict(f"{name}: times OpenMP", 0.99 if row["part"] == "alone" else 1, of(row, "speed over OpenMP")))
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", default="", help="a commit whose amp.h used OpenMP")
    parser.add_argument("--only", default="alone,neighbours,threads")
    parser.add_argument("--works", default="", help="these rows alone: attention,small step ...")
    parser.add_argument("--again", action="store_true", help="put what is measured now into today's file, in place of the same rows")
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--run", type=int, default=250, help="milliseconds of a run")
    parser.add_argument("--run-beside", type=int, default=400, help="the same beside neighbours")
    parser.add_argument("--wait", type=int, default=0, help="seconds to wait for a quiet machine before each run alone")
    parser.add_argument("--out", default="tests/bench/results", help="folder for the JSON file")
    args = parser.parse_args()
    args.threads, args.only = 2, args.only.split(",")
    with tempfile.TemporaryDirectory() as work:
        bench = Bench(args, work)
        used = {"amp.h": build(ROOT, os.path.join(work, "own"))}
        if args.peer:
            used["OpenMP"] = f"{build_peer(args.peer, work)}, commit {args.peer}"
        measure(bench, args.peer)
    used["amp.h version"], used["compiler"] = bench.machine.line["version"], bench.machine.line["compiler"]
    about = run.describe_machine(bench.machine, {})
    now = datetime.datetime.now(datetime.timezone.utc)
    name = f"threads-{run.short_name(about['cpu'])}-{now.strftime('%Y-%m-%d')}.json"
    path, measured = os.path.join(ROOT, args.out, name), bench.rows
    if args.again:
        with open(path) as f:
            again = {(row["part"], row["work"]): row for row in measured}
            measured = [again.pop((row["part"], row["work"]), row) for row in json.load(f)["rows"]] + list(again.values())
    rows = bars(measured)
    os.makedirs(os.path.join(ROOT, args.out), exist_ok=True)
    with open(path, "w") as f:
        json.dump(collections.OrderedDict(date=now.strftime("%Y-%m-%d %H:%M UTC"), machine=about, versions=used,
                                          settings={"runs": args.runs, "run_ms": args.run, "run_beside_ms": args.run_beside},
                                          commands=list(bench.commands), bars=rows, rows=measured), f, indent=1)
        f.write("\n")
    run.show_bars(rows)
    print(f"wrote {os.path.join(args.out, name)}")


if __name__ == "__main__":
    sys.exit(main())
