"""Times a data-parallel training step on two processes of one thread each, and compares it with PyTorch.

    python tests/bench/ddp.py [--models 11m/256,124m/64,124m/256] [--rounds 3] [--steps 5]

It compares train_gpt over TCP and over MPI with PyTorch's DistributedDataParallel (peer_ddp.py), and with one process of
train_gpt with two threads and the same global batch.  `make bench-ddp` calls it, with a Python that has PyTorch.  MPI is
measured if build/train_gpt_mpi exists.  All train in fp32.  The time of a step is rank 0's wall time, the median over the
steps after the warm-up.  The programs take turns, and each round begins with another one.  Ratios are medians over rounds.
Writes tests/bench/results/ddp-CPU-DATE.json.
"""
import argparse
import datetime
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__))]
import run                                                      # noqa: E402

# name of peer_torch.py/tokens: flags of train_gpt, sequences of a rank, tokens of a sequence
GPT2 = "--layers 12 --heads 12 --channels 768 --vocab 50304"
MODELS = {"11m/256": ("--layers 6 --heads 6 --channels 384", 4, 256), "124m/64": (GPT2, 4, 64), "124m/256": (GPT2, 4, 256),
          "tiny/64": ("--layers 2 --heads 2 --channels 64", 4, 64)}
FLAGS = "--precision fp32 --clip none --workers 0 --sample 0 --eval-interval end --eval-batches 1 --log-interval 1 --save none"
WARMUP = 2              # the first step records what backward finishes when: sums hide behind it from the second on
MPI = dict(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
FASTER, SLOWER = 1.3, 1.08


def finish(commands, cwd):
    """Starts commands, each with what its environment has more, side by side; the first one's output."""
    running = [subprocess.Popen(command, cwd=cwd, env={**os.environ, **more}, text=True, stdout=subprocess.PIPE if i == 0 else subprocess.DEVNULL,
                                stderr=subprocess.STDOUT) for i, (command, more) in enumerate(commands)]
    try:
        output = running[0].communicate(timeout=600)[0]
        codes = [process.wait(timeout=60) for process in running]
    except subprocess.TimeoutExpired:
        raise run.Skip("no end within ten minutes")
    finally:
        for process in running:
            process.kill()
    if any(codes):
        raise run.Skip(run.without_paths(f"ended with {codes}: {(output.strip().splitlines() or ['no message'])[-1]}"))
    return output


def train_gpt(program, launcher, environments, batch, threads, flags=()):
    """Its step times, and the share of sums over ranks that backward hid; environments: of each process."""
    def measure(model, steps, work):
        size, _, seq = MODELS[model]
        path = os.path.join(run.ROOT, "build", program)
        if not os.path.exists(path):
            raise run.Skip(f"{program} is not built")
        command = [*launcher, path, *size.split(), *FLAGS.split(), *flags, *f"--seq {seq} --batch {batch(model)} --threads {threads}".split(),
                   *f"--steps {WARMUP + steps} --data {work}/text --out {work}/out".split()]
        output = finish([(command, more) for more in environments()], work)
        with open(f"{work}/out/metrics.jsonl") as f:
            seconds = [r["seconds"] for r in map(json.loads, f) if r["event"] == "step"][WARMUP:]
        hidden = re.search(r"(\d+)% of it hidden behind backward", output)
        return {"seconds": seconds, **({"hidden_percent": int(hidden[1])} if hidden else {})}
    return measure


def ddp(model, steps, work):
    _, batch, seq = MODELS[model]
    output = finish([([sys.executable, os.path.join(run.HERE, "peer_ddp.py"), *f"--model {model.split('/')[0]} --batch {batch} --seq {seq}".split(),
                       *f"--steps {steps} --warmup {WARMUP}".split()], {})], work)
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return {"seconds": found["seconds"], "torch": found["version"]}


def tcp_ranks():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [dict(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)) for rank in range(2)]


def own_batch(model):
    return MODELS[model][1]


def whole_batch(model):
    return 2 * own_batch(model)


MPIRUN = "mpirun --oversubscribe --bind-to none -np 2".split()
PROGRAMS = {"torch DDP": ddp,
            "amp.h TCP": train_gpt("train_gpt", [], tcp_ranks, own_batch, 1),
            "amp.h MPI": train_gpt("train_gpt_mpi", MPIRUN, lambda: [MPI], own_batch, 1),
            "amp.h MPI, sharded states": train_gpt("train_gpt_mpi", MPIRUN, lambda: [MPI], own_batch, 1, ("--shard", "states")),
            "amp.h one process": train_gpt("train_gpt", [], lambda: [{}], whole_batch, 2)}


def rounds(machine, model, args, work):
    """For each program what its rounds measured, or why it did not run."""
    found, skipped = {name: [] for name in PROGRAMS}, {}
    for i in range(args.rounds):
        names = list(PROGRAMS)
        for name in names[i % len(names):] + names[:i % len(names)]:
            if name in skipped:
                continue
            try:
                one, busy = machine.others(lambda: PROGRAMS[name](model, args.steps, work))
            except run.Skip as skip:
                skipped[name] = str(skip)
                print(f"    {name:25s} skipped: {skip}", flush=True)
                continue
            machine.busy.append(round(busy, 3))
            one["used_by_others"] = machine.busy[-1]
            one["median"] = statistics.median(one["seconds"])
            found[name].append(one)
            print(f"    {name:25s} {1e3 * one['median']:9.1f} ms", flush=True)
    return {name: {"skipped": skipped[name]} if name in skipped else summary(found[name]) for name in PROGRAMS}


def summary(found):
    row = {"median_ms": round(1e3 * statistics.median(r["median"] for r in found), 1),
           "rounds_ms": [round(1e3 * r["median"], 1) for r in found], "used_by_others": [r["used_by_others"] for r in found]}
    for key in ("hidden_percent", "torch"):
        if key in found[0]:
            row[key] = statistics.median(r[key] for r in found) if key == "hidden_percent" else found[0][key]
    return row


def ratio(programs, above, below):
    """The median over rounds of above's time over below's."""
    for name in (above, below):
        if "skipped" in programs[name]:
            raise run.Skip(f"{name}: {programs[name]['skipped']}")
    return statistics.median(a / b for a, b in zip(programs[above]["rounds_ms"], programs[below]["rounds_ms"]))


def bars(rows):
    for model, programs in rows.items():
        for name in ("amp.h TCP", "amp.h MPI"):
            yield run.verdict(f"{model}, {name}: times torch DDP's speed", FASTER, lambda: ratio(programs, "torch DDP", name))
            yield run.verdict(f"{model}, {name}: of one process's time", SLOWER, lambda: ratio(programs, name, "amp.h one process"), at_most=True)


def judged(rows, busy):
    """The bars; nothing is decided on a machine that others used: the programs did not have the same share of it."""
    why = {"verdict": "undecided", "why": f"other programs used {busy:.0%} of the machine"}
    return [{**row, **why} if busy > run.QUIET and row["measured"] is not None else row for row in rows]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="11m/256,124m/64,124m/256")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", default="tests/bench/results")
    args = parser.parse_args()
    args.threads = 1
    machine, load, rows = run.Machine(args), os.getloadavg()[0], {}
    with tempfile.TemporaryDirectory() as work:
        with open(os.path.join(run.ROOT, "amp.h"), "rb") as source, open(f"{work}/text", "wb") as text:
            text.write(source.read(400000))
        for model in args.models.split(","):
            print(f"{model}: {own_batch(model)} sequences of {MODELS[model][2]} a rank", flush=True)
            rows[model] = rounds(machine, model, args, work)
    about, date, verdicts = run.describe_machine(machine, {}), datetime.datetime.now(datetime.timezone.utc), bars(rows)
    verdicts = judged(verdicts, about["used_by_others"]["median"])
    about.pop("path"), about.pop("amx")         # only timing programs tell them
    used = {key: value for key, value in run.versions(machine).items() if value is not None}
    whole = {"date": date.strftime("%Y-%m-%d %H:%M UTC"), "machine": {**about, "load_before": load}, "versions": used,
             "command": f"python tests/bench/ddp.py --models {args.models} --rounds {args.rounds} --steps {args.steps}",
             "settings": {"ranks": 2, "threads_of_a_rank": 1, "warmup": WARMUP, "flags": FLAGS,
                          "models": {m: "%s; %d sequences of %d tokens a rank" % MODELS[m] for m in rows}},
             "bars": verdicts, "rows": rows}
    path = os.path.join(args.out, f"ddp-{run.short_name(run.cpu_name())}-{date.strftime('%Y-%m-%d')}.json")
    with open(os.path.join(run.ROOT, path), "w") as f:
        f.write(re.sub(r"\[\s+([\d., \n]*?)\s+\]", lambda row: "[" + re.sub(r"\s+", " ", row[1]) + "]", json.dumps(whole, indent=1)) + "\n")
    run.show_bars(verdicts)
    print(f"wrote {path}")


if __name__ == "__main__":
    sys.exit(main())
