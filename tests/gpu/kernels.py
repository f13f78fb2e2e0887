"""Times the kernels: bench_gpu and PyTorch (peer_gpu.py) in turn, round by round.

run.py uses it: measure() times a group of cases, bars() rates them, and show() prints them.
"""
import collections
import os
import shlex
import statistics

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
SPARE = 3           # seconds that a case needs at least


class Timer:
    """bench_gpu and PyTorch's program, which both run on from case to case."""
    def __init__(self, runner):
        self.runner, session, args = runner, runner.session, runner.args
        tiny = ["--tiny"] if args.rehearse else []
        flags = ["--ms", str(args.ms)] + tiny
        self.ours_command = [os.path.join(runner.bin, "bench_gpu"), "--turns", "--autotune"] + flags
        peer = flags + (["--device", "cpu"] if args.rehearse else [])
        self.peer_command = [runner.python, os.path.join(os.path.dirname(__file__), "peer_gpu.py")] + peer
        runner.shown(shlex.join(["bench_gpu"] + self.ours_command[1:]))
        runner.shown("$PEER_TORCH " + shlex.join(["tests/gpu/peer_gpu.py"] + peer))
        if session.cases is None:
            session.cases = self.find_cases(tiny)

    def find_cases(self, tiny):
        """Of each case its group, and the modes that PyTorch has of it; the versions PyTorch told of itself."""
        found = self.runner.lines("bench_gpu --list", [self.ours_command[0], "--list"] + tiny, 30)
        cases = collections.OrderedDict((r["case"], {"group": r["group"], "modes": {}}) for r in found if r["event"] == "listed")
        peer, answer = self.peer(), {}
        peer.tell("list")
        while answer is not None and answer.get("event") != "end":
            answer = peer.hear(90)
            if answer and answer["event"] == "versions":
                self.runner.session.torch = answer
            if answer and answer["event"] == "listed" and answer["case"] in cases:
                cases[answer["case"]]["modes"][answer["mode"]] = answer["call"]
        if answer is None:
            self.runner.skip(f"PyTorch: {(peer.messages() or ['no answer'])[-1]}")
        return cases

    def ours(self):
        talk = self.runner.session.talk("bench_gpu", self.ours_command)
        if not talk.greeted:                    # the device's line
            talk.greeted = talk.hear(30) is not None
        return talk

    def peer(self):
        return self.runner.session.talk("peer_gpu", self.peer_command)

    def case(self, name, compiled):
        """Our rounds, and per mode PyTorch's: None where ours failed."""
        runner, ours = self.runner, self.ours()
        ready = ours.ask("case " + name, runner.left())
        if ready is None or ready["event"] != "ready":
            runner.skip(f"{name}: {ready.get('why', 'no answer') if ready else 'stopped'}")
            if ready and ready["event"] == "failed":
                ours.hear(5)
            return None
        found = {"ready": ready, "rounds": [], "mhz": [], "peers": collections.OrderedDict()}
        modes = {mode: call for mode, call in runner.session.cases[name]["modes"].items() if (mode == "compile") == compiled}
        for mode, call in modes.items():
            found["peers"][mode] = dict(call=call, **self.turns(name, mode, ours, found))
        if not found["rounds"]:
            self.rounds(ours, None, found)
        ours.ask("end", 10)
        return found if found["rounds"] else None

    def turns(self, name, mode, ours, found):
        """Rounds of both in turn; the ratio is that of these rounds."""
        peer = self.peer()
        peer.tell(f"case {mode} {name}")
        answer = peer.hear(self.runner.left())
        while answer and answer["event"] == "versions":
            answer = peer.hear(self.runner.left())
        if answer is None or answer["event"] != "ready":
            if answer and answer["event"] != "end":
                peer.hear(5)
            return {"skipped": (answer or {}).get("why", "no answer in time")}
        before = len(found["rounds"])
        theirs = self.rounds(ours, peer, found)
        peer.ask("end", 10)
        mine = found["rounds"][before:]
        if not theirs or not mine:
            return {"skipped": "no answer in time"}
        ms, own = statistics.median(theirs), statistics.median(mine)
        return {"ms": round(ms, 6), "rounds_ms": theirs, "ratio": round(ms / own, 3) if own > 0 else None}

    def rounds(self, ours, peer, found):
        """The first pair is not kept: the clock may have fallen while operands were made."""
        theirs = []
        for i in range(self.runner.args.rounds + 1):
            one = ours.ask("round", self.runner.left())
            other = peer.ask("round", self.runner.left()) if peer else None
            if one is None or "ms" not in one or (peer and (other is None or "ms" not in other)):
                break
            if i == 0 and self.runner.args.rounds > 1:
                continue
            found["rounds"].append(round(one["ms"], 6))
            found["mhz"].append(one["mhz"])
            if other:
                theirs.append(round(other["ms"], 6))
        return theirs


# ---- What was measured, case by case

def put_case(rows, name, found):
    """Into the file's rows: our rounds, and the modes that were timed now beside those of before."""
    ready, row = found["ready"], rows.setdefault(name, {})
    ms = statistics.median(found["rounds"])
    row.update(bytes=ready["bytes"], runs_ms=found["rounds"], host_us=ready["host_us"], ms=round(ms, 6),
               mhz=round(statistics.median(found["mhz"])),
               spread=round(max(found["rounds"]) / min(found["rounds"]) - 1, 4) if min(found["rounds"]) > 0 else None,
               gb_per_s=float(f"{ready['bytes'] / ms * 1e-6:.4g}") if ms > 0 else None)
    if ready["operations"] and ms > 0:
        row["tflop_per_s"] = float(f"{ready['operations'] / ms * 1e-9:.4g}")
    if found["peers"]:
        row.setdefault("peers", {}).update(found["peers"])


def copy_rate(rows):
    """Bytes per second of the faster copy: read and written bytes both count."""
    return max([row["gb_per_s"] for name, row in rows.items() if name.startswith("copy") and row["gb_per_s"]] or [0])


def measure(runner, whole, group, compiled, save):
    """Times a group; the copies first, by which it is measured, where the file has none.  Saved after each case."""
    timer = Timer(runner)
    names = [name for name, case in runner.session.cases.items() if case["group"] == group and
             (not compiled or "compile" in case["modes"])]
    if not whole["copy_gb_per_s"]:
        names = [name for name, case in runner.session.cases.items() if case["group"] == "copies"] + names
    for i, name in enumerate(names):
        if runner.left() < SPARE:
            runner.skip(f"no time left for {', '.join(names[i:])}")
            break
        found = timer.case(name, compiled)
        if found:
            put_case(whole["cases"], name, found)
            whole["cases"][name]["cublas"] = whole["device"].get("cublas")
            whole["copy_gb_per_s"] = copy_rate(whole["cases"])
            save()
    for row in whole["cases"].values():
        copy = whole["copy_gb_per_s"]
        row["share"] = round(row["gb_per_s"] / copy, 4) if copy and row["gb_per_s"] else None
    whole["settings"] = {"rounds": runner.args.rounds, "ms": runner.args.ms, "autotune": True}
    tuned = [text.split("amp_cuda: ", 1)[1] for text in timer.ours().messages() if "autotune:" in text]
    for text in tuned:                          # of each product the last that was said
        product, _, choice = text.removeprefix("autotune: ").partition(": ")
        whole.setdefault("autotune", {})[product] = choice


def bars(rows, verdict, why):
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


def cell(value, form):
    return "-" if value is None else format(value, form)


def show(rows, verdicts, copy):
    print(f"\ncopies {copy:.4g} GB/s\n{'case':42s} {'ms':>9s} {'GB/s':>7s} {'of copy':>8s} {'TFLOP/s':>8s} {'MHz':>5s} {'eager':>7s} "
          f"{'compiled':>9s}  bars")
    for name, row in rows.items():
        peers = row.get("peers", {})
        ratios = [cell(peers.get(mode, {}).get("ratio"), ".2f") + ("x" if peers.get(mode, {}).get("ratio") else "")
                  for mode in (BACKENDS if name.startswith("attention") else ("eager", "compile"))]
        own = [v["verdict"] for v in verdicts if v["bar"].startswith(name + ":")]
        worst = next((word for word in ("FAIL", "not measured", "PASS") if word in own), "")
        print(f"{name:42s} {cell(row['ms'], '.4f'):>9s} {cell(row['gb_per_s'], '.4g'):>7s} {cell(row.get('share'), '.1%'):>8s} "
              f"{cell(row.get('tflop_per_s'), '.4g'):>8s} {cell(row.get('mhz'), 'd'):>5s} {ratios[0]:>7s} {ratios[1]:>9s}  {worst}")
    print("eager, compiled (attention: flash, cuDNN): how many times as fast as PyTorch's.")
