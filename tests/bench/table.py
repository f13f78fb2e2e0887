"""Writes the documents' statements about speed and accuracy, with verdicts, from the newest result files.

They are written between these markers:

    <!-- NAME:begin -->
    <!-- NAME:end -->

  - steps: README.md, with the training steps, the gain of adopting, and two ranks.  Its picture examples/plot/bars.svg
    (chart.gp) is drawn too.
  - bench and gpu: tests/bench/README.md, with all bars and the accuracy.
  - adopt: examples/adopt/README.md.
  - state and example: README.md and examples/README.md, with the GPU that has run the CUDA backend, the results of its
    tests, and what has changed since.
  - parts: tests/bench/README.md, with the cost of compiling amp.h, whole and in parts.

    python3 tests/bench/table.py [--print] [--only steps,bench,gpu,adopt,state,example,parts] [results.json]

`make readme` calls it.  Results of a machine on which another program was running are rejected.  If there are no results of
a GPU, its table is left empty.
"""
import argparse
import glob
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
MODELS = {"124m": "GPT-2 124M", "30m": "30M", "11m": "11M bytes"}
BUSY = 0.06
PLACES = {"steps": "README.md", "bench": "tests/bench/README.md", "gpu": "tests/bench/README.md",
          "adopt": "examples/adopt/README.md", "state": "README.md", "example": "examples/README.md",
          "parts": "tests/bench/README.md"}
# The picture's bars: of the first training steps, in this order.
BARS = [("amp.h bf16", "amp.h, bf16"), ("torch compile bf16", "PyTorch compiled, bf16"), ("torch eager bf16", "PyTorch, bf16"),
        ("amp.h fp32", "amp.h, fp32"), ("torch compile fp32", "PyTorch compiled, fp32"), ("torch eager fp32", "PyTorch, fp32"),
        ("llm.c with BLAS", "llm.c with OpenBLAS, fp32"), ("llm.c", "llm.c, fp32")]
# The beginning of the sentence on adopting in README.md, which examples/adopt/README.md omits.
ADOPTED = "Adopting amp.h makes a plain trainer faster ([before, after](examples/adopt/README.md)): "


def newest(kind):
    found = []
    for path in glob.glob(os.path.join(HERE, "results", kind + "-*.json")):
        with open(path) as f:
            found.append((json.load(f)["date"], path))
    if not found:
        sys.exit(f"no {kind} results in tests/bench/results: run make bench and make accuracy")
    return max(found)[1] if found else None


def table(head, rows):
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"


def step_table(steps):
    """Tokens per second; behind each other program how many times as fast amp.h is."""
    def cell(row, ours, name, title=""):
        program, ratio = row["programs"].get(name, {}), row["ratios"].get(f"{ours} / {name}")
        if "tokens_per_s" not in program:
            return ""
        times = f" ({ratio:.2f}x)" if isinstance(ratio, (int, float)) else ""
        return f"{title}{program['tokens_per_s']:,.0f}{times}"

    def line(row, precision):
        ours = f"amp.h {precision}"
        others = [("llm.c", "llm.c "), ("llm.c with BLAS", "llm.c with OpenBLAS ")]
        if precision == "bf16":
            others = [("amp.h fp32", "own fp32 ")]
        texts = [cell(row, ours, name, title) for name, title in others]
        return [f"{MODELS.get(row['model'], row['model'])}, T={row['seq']}, {precision}", cell(row, ours, ours),
                cell(row, ours, f"torch eager {precision}"), cell(row, ours, f"torch compile {precision}"),
                ", ".join(text for text in texts if text)]

    rows = [line(row, precision) for row in steps for precision in ("fp32", "bf16")]
    yield from table(["tokens/s, B=4", "amp.h", "PyTorch eager", "PyTorch compiled", "others"], rows)
    yield ""


def recompute_text(rows):
    if not isinstance(rows, list):
        return ""
    return " Memory and time with recomputing: " + "; ".join(
        f"{MODELS.get(row['model'], row['model'])}, T={row['seq']}, {row['precision']}: "
        f"{row['recomputed']['memory_bytes'] / 2 ** 20:,.0f} of {row['kept']['memory_bytes'] / 2 ** 20:,.0f} MiB, "
        f"{row['time']:.2f}x the time" for row in rows) + "."


def accuracy_text(rows):
    """Mean and worst error of the tests' figures: a text per subject and precision."""
    found = {}
    for row in rows:
        subject, precision = row["figure"].rsplit(", ", 1)
        unit = "" if row["bound"] > 1 else "relative "
        found.setdefault(subject, []).append(f"{precision} {unit}{row['mean']:.2g} / {row['worst']:.3g}")
    return "; ".join(f"{subject} {', '.join(texts)}" for subject, texts in found.items())


def number(value):
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def bar_texts(bars):
    """One text per subject with the same bar: the products of one instruction, the loader's rates."""
    groups = {}
    for row in bars:
        group, _, what = row["bar"].partition(", ")
        if row["bar"].startswith("GEMM"):
            words = row["bar"].split(": share")[0].split()
            group, what = f"{' '.join(words[:2])}, share of the peak", " ".join(words[2:])
        elif "tokens/s" not in group:
            group, what = row["bar"], ""
        groups.setdefault((group, row.get("needs", "")), []).append((what, row))
    for (group, needs), rows in groups.items():
        each = [number(row["measured"]) + (f" ({what})" if what else "") for what, row in rows]
        met = sum(row["verdict"] == "PASS" for _, row in rows)
        verdict = rows[0][1]["verdict"] if len(rows) == 1 else f"{met} of {len(rows)}"
        yield f"{group} {', '.join(each)}: {needs}, {verdict}"


def verdict_text(bars):
    """How many bars are met; of the steps', which the table above shows, those that are not."""
    def met(rows):
        return f"{sum(row['verdict'] == 'PASS' for row in rows)} of {len(rows)}"

    steps = [row for row in bars if row["bar"].startswith("step ")]
    failed = [f"{row['bar'][len('step '):]}: {number(row['measured'])}, {row['needs']}" for row in steps
              if row["verdict"] != "PASS"]
    text = f"{met(bars)} bars are met, {met(steps)} of the training steps' bars"
    return f"{text} (not met: {'; '.join(failed)})." if failed else f"{text}."


def machine_text(results):
    m, v = results["machine"], results["versions"]
    peers = f", PyTorch {v['torch']}" if "torch" in v else ""
    return (f"{m['cpu']}, {m['cores']} cores, kernels {m['path']}, {results['settings']['threads']} threads, gcc "
            f"{v.get('compiler', '-')}{peers}; {results['date']}")


def step_lines(results, name):
    """Of README.md."""
    yield (f"Measured by `make bench` on {machine_text(results)}. The programs ran in turn. Speeds are medians of "
           f"{results['settings']['rounds']} rounds, from [{name}](tests/bench/results/{name}). Brackets give amp.h's speed over "
           "that program's.")
    yield ""
    yield from step_table(results["step"])
    yield (f"{verdict_text(results['bars'])} A bar is a target that a measurement must reach. [tests/bench](tests/bench/README.md) "
           "has all bars and the accuracy.")


def lines(results, name, accuracy, accuracy_name):
    """Of tests/bench/README.md."""
    yield f"Measured by `make bench` on {machine_text(results)}; the results are in [{name}](results/{name})."
    yield ""
    other = [row for row in results["bars"] if not row["bar"].startswith("step ")]
    if other:
        yield "Each line has what was measured, the bar, and the verdict:"
        yield ""
        yield from (f"- {text}" for text in bar_texts(other))
        yield ""
    yield verdict_text(results["bars"]) + recompute_text(results.get("recompute"))
    yield ""
    yield ("The tests' errors divided by PyTorch's own on the same data, both against fp64, as mean / worst (RMS over 16 seeds; at "
           "most 1.2 is allowed; the errors of fp32 models are relative, and at most 1e-5 is allowed): "
           f"{accuracy_text(accuracy['accuracy'])}. Measured by `make accuracy`; the results are in "
           f"[{accuracy_name}](results/{accuracy_name}).")


def adopt_lines(results, name, folder):
    """What the GEMM gave, which is fp32's gain, and what precision gave on top of it."""
    seconds = {row["program"]: row["seconds"] for row in results["rows"]}
    losses = ", ".join(f"{row['test_loss']:.4f}" for row in results["rows"])
    fp32 = seconds["before"] / seconds["after, fp32"]

    def gain(precision):
        all_of_it, own = seconds["before"] / seconds[f"after, {precision}"], seconds["after, fp32"] / seconds[f"after, {precision}"]
        return f"{all_of_it:.1f}x in {precision}: {fp32:.1f}x from the GEMM, {own:.1f}x from precision"

    m = results["machine"]
    yield (f"{ADOPTED}{fp32:.1f}x in fp32, all of it the GEMM's; {gain('bf16')}; {gain('fp16')}. The test losses, before and then "
           f"after in fp32, fp16 and bf16, are {losses}. Measured by `make adopt` on {m['cpu']} with {m['path'].upper()}, which the bf16 "
           f"figure needs, {m['cores']} cores; medians of {results['settings']['rounds']} runs, from [{name}]({folder}{name}).")


def ddp_lines(results, name):
    """Two ranks beside PyTorch's, and beside one process with as many threads."""
    def sentence(model, programs):
        peer, one = programs["torch DDP"]["median_ms"], programs["amp.h one process"]["median_ms"]
        own = [(label.removeprefix("amp.h "), row["median_ms"]) for label, row in programs.items()
               if label.startswith("amp.h ") and label != "amp.h one process" and "median_ms" in row]
        name, tokens = model.split("/")
        return (f"{MODELS[name]}, T={tokens}: " + ", ".join(f"{peer / ms:.2f}x over {label} ({ms / one:.2f} times one process's time)"
                                                 for label, ms in own))

    m, met = results["machine"], sum(row["verdict"] == "PASS" for row in results["bars"])
    yield (f"Data-parallel training in fp32 with two ranks of one thread each, as speed over PyTorch's DistributedDataParallel (gloo) "
           f"and, in brackets, as time over one process: {'; '.join(sentence(*row) for row in results['rows'].items())}. "
           f"{met} of {len(results['bars'])} bars are met. Measured by `make bench-ddp` on {m['cpu']}, {m['cores']} cores; the results are "
           f"in [{name}](tests/bench/results/{name}).")


def sources(parts, name):
    """The hashes of this file that these parts of a GPU's record were measured with, and the one it has now."""
    with open(os.path.join(ROOT, name), "rb") as f:
        now = "sha256 " + hashlib.sha256(f.read()).hexdigest()[:16]
    return {part.get("versions", {}).get(name) for part in parts}, now


def changed_since(results, *names):
    """Whether the sources are those that these parts were measured with, part:what counting as part; none: all parts."""
    parts = [part for key, part in results["parts"].items() if not names or key.split(":")[0] in names]
    known = {name: sources(parts, name) for name in ("amp_cuda.cu", "amp.h")}
    if any(None in hashes for hashes, _ in known.values()):
        return "its record does not say of which amp_cuda.cu"
    changed = [name for name, (hashes, now) in known.items() if hashes - {now}]
    if not changed:
        return "with the amp_cuda.cu and amp.h of here"
    return f"{' and '.join(changed)} {'has' if len(changed) == 1 else 'have'} changed since"


TESTS = {"rules": "cuBLASLt's rules", "hopper": "attention for Hopper", "attention": "attention", "fp8": "fp8", "tests": "all others",
         "sanitizers": "compute-sanitizer"}


def gpu_tests(results):
    """The counts of all parts that are tests, and which of them were not run."""
    rows = {part: results.get(part) for part in TESTS}
    if rows["sanitizers"]:
        rows["sanitizers"] = {count: sum(row[count] for row in rows["sanitizers"].values()) for count in ("passed", "failed", "skipped")}
    found = {count: sum((row or {}).get(count, 0) for row in rows.values()) for count in ("passed", "failed", "skipped")}
    # compute-sanitizer's rows were among "all others" before they had their own; older records have no part for Hopper
    found["not run"] = [TESTS[part] for part, row in rows.items() if part in results and not row and part != "sanitizers"]
    return found


def tests_text(results):
    """What a GPU's tests said, and of which sources that speaks."""
    t = gpu_tests(results)
    left = f"the tests of {' and '.join(t['not run'])} were not run; " if t["not run"] else ""
    since = changed_since(results, "link", "racecheck", "memcheck", "synccheck", *TESTS)
    return (f"{t['passed']} tests passed, {t['failed']} failed and {t['skipped']} were skipped, most of which need the model of a GPU "
            f"({results['date'][:10]}; {left}{since})")


def gpu_state():
    """Which GPUs have run the CUDA backend, and what the newest record says."""
    names = set()
    for path in glob.glob(os.path.join(HERE, "results", "gpu-*.json")):
        with open(path) as f:
            names.add(json.load(f)["device"]["name"])
    with open(newest("gpu")) as f:
        results = json.load(f)
    return f"{' and an '.join(sorted(names))} and on no other GPU. In the newest run {tests_text(results)}"


def state_text(_path, _trial):
    return (f"- **GPU**: the CUDA backend has been run on an {gpu_state()}. It builds with nvcc 13 for sm_75 to sm_121. With "
            "the headers and ptxas of CUDA 11.8 to 12.9, clang compiles it for sm_70 (V100) to sm_90a. Every "
            "change is tested on a model of a GPU that runs on the CPU.")


def example_text(_path, _trial):
    return f"The CUDA backend has been run on an {gpu_state()}. `make test` runs all of it on a model of a GPU."


def gpu_sentence(results, name):
    """Of README.md: whole steps, then attention alone; nothing of what the record lacks."""
    def one(title, row):
        peers = " and ".join(f"{peer['ratio']:.2f}x PyTorch {mode}" for mode, peer in row.get("peers", {}).items() if peer.get("ratio"))
        share = f" (MFU {row['mfu']:.1%})" if row.get("mfu") else ""
        return f"at {row['tokens_per_s']:,.0f} tokens/s with {title}{share}" + (f", {peers}" if peers else "")

    step = results.get("step") or {"rows": {}, "model": {}}
    few = f"B={step['model'].get('few')}"
    wanted = {"bf16": f"B={step['model'].get('batch')}", f"bf16, {few}, graph": f"{few} in a CUDA graph"}
    rows = [one(title, step["rows"][row]) for row, title in wanted.items() if row in step["rows"]]
    texts = [f"GPT-2 124M (T={step['model']['seq']}, bf16) trains {', and '.join(rows)}."] if rows else []
    ratios = {mode: [row["peers"][mode]["ratio"] for case, row in results["cases"].items() if case.startswith("attention") and
                     row.get("peers", {}).get(mode, {}).get("ratio")] for mode in ("flash", "cudnn")}
    if all(ratios.values()):
        texts.append(f"Attention alone runs at {min(ratios['flash']):.2f} to {max(ratios['flash']):.2f} times the speed of PyTorch's "
                     f"flash kernels and {min(ratios['cudnn']):.2f} to {max(ratios['cudnn']):.2f} times cuDNN's.")
    met = sum(row["verdict"] == "PASS" for row in results["bars"])
    since = changed_since(results, "step", "peer", "kernels", "compiled")
    return (f"On an {results['device']['name']} ({results['date'][:10]}; {since}): {' '.join(texts)} {met} of "
            f"{len(results['bars'])} bars are met. [tests/bench](tests/bench/README.md#on-a-gpu) lists every kernel. Measured by "
            f"`make gpu`; the results are in [{name}](tests/bench/results/{name}).")


def chart(results):
    """examples/plot/bars.svg: the bars of the first training steps."""
    row = results["step"][0]
    if not shutil.which("gnuplot"):
        return print("no gnuplot: examples/plot/bars.svg stays as it is", file=sys.stderr)
    data = "".join(f"{label}\t{row['programs'][key]['tokens_per_s']:.0f}\t{int(key.startswith('amp.h'))}\n"
                   for key, label in BARS if "tokens_per_s" in row["programs"].get(key, {}))
    m = results["machine"]
    title = (f"Training {MODELS.get(row['model'], row['model'])}, batch {row['batch']} x {row['seq']}: tokens/s on "
             f"{m['cores']} cores of {m['cpu'].replace('(R)', '')} (kernels {m['path']}), {results['date'][:10]}")
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as file:
        file.write(data)
        file.flush()
        subprocess.run(["gnuplot", "-e", f"title='{title}'; data='{file.name}'", os.path.join(HERE, "chart.gp")], check=True,
                       cwd=ROOT)
    return None


def gpu_step_lines(step, since):
    """Whole training steps: a line per row and program."""
    def cells(name, program, row):
        return [name, program, f"{row['tokens_per_s']:,.0f}", f"{row['mfu']:.1%}" if row.get("mfu") else "",
                f"{row['peak_mib']:,.0f}" if row.get("peak_mib") else "", f"{row['ratio']:.2f}x" if row.get("ratio") else ""]

    m, rows = step["model"], []
    for name, row in step["rows"].items():
        every = [("amp.h", row)] + [("PyTorch " + mode, peer) for mode, peer in row.get("peers", {}).items()]
        rows += [cells(name, program, one) for program, one in every if one.get("tokens_per_s")]
    yield (f"Training steps of GPT-2 with {step.get('parameters', 0) / 1e6:.0f}M parameters, B={m['batch']}, T={m['seq']}, measured by "
           f"`make gpu ROWS=step` ({since}). MFU = {step['formula']}, {step.get('dense_bf16_tflop_per_s') or '-'} TFLOP/s.")
    yield ""
    yield from table(["step", "program", "tokens/s", "MFU", "peak MiB", "amp.h is"], rows)
    yield ""
    if step.get("curves"):
        c = step["curves"]
        yield (f"Over {len(c['amp.h'])} steps from the same weights on the same tokens, the loss of amp.h goes from {c['amp.h'][0]:.4f} to "
               f"{c['amp.h'][-1]:.4f} and the loss of PyTorch from {c['torch'][0]:.4f} to {c['torch'][-1]:.4f}. They are at most "
               f"{c['largest_difference']:.2g} apart.")
        yield ""


def data_lines(results):
    """The loader and the mask cache, and PyTorch's loader."""
    rows = results.get("loader") or []
    copies = [f"{'PyTorch' if row['event'].startswith('torch') else 'amp.h'} {row.get('from', 'pin_memory')} {row['gb_per_s']:.1f}"
              for row in rows if row["event"] in ("copy", "torch copy", "torch pin_memory")]
    batches = [f"{'pinned' if row['pinned'] else 'pageable'} {row['gb_per_s']:.1f} GB/s, {row['hidden']:.0%} hidden behind a step"
               for row in rows if row["event"] == "batches"]
    calls = [f"{'PyTorch' if row['event'] == 'torch next' else 'amp.h'} with {row['workers']}: {row['median_us']:.0f} us" for row in rows
             if row["event"] in ("next", "torch next")]
    if rows:
        yield (f"Data to the GPU, GB/s: {', '.join(copies)}. The loader's batches: {'; '.join(batches)}. The next batch, by workers: "
               f"{'; '.join(calls)}.")
        yield ""
    if results.get("masks"):
        yield "Softmax under a mask of documents: " + "; ".join(
            f"{row['way']} {row['us']:.0f} us, {row['hits']} hits, {row['misses']} misses, {row['bytes']:,} bytes cached"
            for row in results["masks"]) + "."
        yield ""


def gpu_lines(results, name):
    """A line per case; behind PyTorch's modes how many times as fast amp.h is."""
    def cell(row, mode):
        peer = row.get("peers", {}).get(mode, {})
        return f"{peer['ms']:.3f} ({peer['ratio']:.2f}x)" if "ratio" in peer else ""

    def line(case, row):
        own = [v["verdict"] for v in results["bars"] if v["bar"].startswith(case + ":")]
        modes = ("flash", "cudnn") if case.startswith("attention") else ("eager", "compile")
        return [case, f"{row['ms']:.3f}", f"{row['share']:.0%}" if row.get("share") else "-", cell(row, modes[0]),
                cell(row, modes[1]), next((word for word in ("FAIL", "not measured", "PASS") if word in own), "")]

    d, v = results["device"], results["versions"]
    if results.get("step"):
        yield from gpu_step_lines(results["step"], changed_since(results, "step", "peer"))
    yield from data_lines(results)
    if not results["cases"]:
        return
    copy = results["copy_gb_per_s"]
    blas = f", cuBLAS {v['cublas']}" if v.get("cublas") else ""
    yield (f"Measured by `make gpu` on {d['name']}, driver CUDA {v['driver']}, nvcc {v['nvcc']}{blas}, PyTorch {v.get('torch') or '-'}; "
           f"{results['date']}. Times are medians of {results['settings']['rounds']} rounds over operands that the L2 cache does not hold "
           f"({changed_since(results, 'kernels', 'compiled')}), from [{name}](results/{name}). {tests_text(results)}. Copies run at "
           f"{copy:,.0f} GB/s, read and written; \"of copy\" is a kernel's share of that. Brackets give amp.h's speed over PyTorch's.")
    yield ""
    yield from table(["kernel", "ms", "of copy", "PyTorch eager (attention: flash), ms", "compiled (attention: cuDNN), ms", "bars"],
                     [line(case, row) for case, row in results["cases"].items() if not case.startswith(("copy", "read"))])
    yield ""
    for word, text in (("FAIL", "Below their bar"), ("not measured", "Not measured")):
        bars = [f"{b['bar']} ({b['measured']:g}, {b['needs']})" if b["measured"] is not None else b["bar"]
                for b in results["bars"] if b["verdict"] == word]
        if bars:
            yield f"{text}: {'; '.join(bars)}."
            yield ""


def quiet(path, trial):
    with open(path) as f:
        results = json.load(f)
    busy = results["machine"]["used_by_others"]["median"]
    if busy > BUSY and not trial:
        sys.exit(f"{os.path.basename(path)}: other programs used {busy:.0%} of the machine: measure again")
    return results


def steps_text(path, trial):
    results, gains, ranks, device = quiet(path, trial), newest("adopt"), newest("ddp"), newest("gpu")
    if not trial:
        chart(results)
    with open(gains) as f:
        adopted = adopt_lines(json.load(f), os.path.basename(gains), "tests/bench/results/")
    with open(device) as f:
        on_gpu = gpu_sentence(json.load(f), os.path.basename(device))
    return "\n".join([*step_lines(results, os.path.basename(path)), "", *adopted, "",
                      *ddp_lines(quiet(ranks, trial), os.path.basename(ranks)), "", on_gpu])


def bench_text(path, trial):
    errors = newest("accuracy")
    with open(errors) as f:
        accuracy = json.load(f)
    return "\n".join(lines(quiet(path, trial), os.path.basename(path), accuracy, os.path.basename(errors))).rstrip()


def adopt_text(path, _trial):
    with open(path) as f:
        text = "\n".join(adopt_lines(json.load(f), os.path.basename(path), "../../tests/bench/results/"))
    return text.replace(ADOPTED, "")


def gpu_text(path, trial):
    if path is None:
        return ""
    with open(path) as f:
        results = json.load(f)
    if results["device"]["name"] == "model" and not trial:
        sys.exit(f"{os.path.basename(path)} is a rehearsal on the model GPU")
    return "\n".join(gpu_lines(results, os.path.basename(path))).rstrip()


def parts_text(path, _trial):
    with open(path) as f:
        results = json.load(f)
    rows = [[row["compiled"], f"{row['cpu_seconds']:.1f}", f"{row['bytes']:,}" if row.get("bytes") else "-",
             f"{row['over_peer']:.2f}" if row["over_peer"] else "-"] for row in results["rows"]]
    peer = results["command"].partition("--peer ")[2].split()[:1]
    name = os.path.basename(path)
    rounds = "one round" if results["rounds"] == 1 else f"medians of {results['rounds']} rounds"
    return "\n".join([f"`{results['compiler']}`, {results['machine']['cpu']}, {rounds}, from [{name}](results/{name}):", "",
                      *table(["compiled, -O2 unless said", "CPU seconds", "bytes", f"in ratio to {peer[0]}" if peer else "ratio"], rows)])


def put(name, value):
    """`value` between the markers of `name`, in its document."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    path = os.path.join(ROOT, PLACES[name])
    with open(path) as f:
        text = f.read()
    if text.count(begin) != 1 or text.count(end) != 1:
        sys.exit(f"{PLACES[name]} needs one {begin} and one {end}")
    with open(path, "w") as f:
        f.write(text.split(begin)[0] + begin + "\n" + (value + "\n" if value else "") + end + text.split(end)[1])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--print", action="store_true", help="to stdout, not into the documents")
    parser.add_argument("--only", default="steps,bench,gpu,adopt,state,example,parts")
    parser.add_argument("results", nargs="?", help="a file; default: the newest of its kind")
    args = parser.parse_args()
    tables = {"steps": ("cpu", steps_text), "bench": ("cpu", bench_text), "gpu": ("gpu", gpu_text), "adopt": ("adopt", adopt_text),
              "state": ("gpu", state_text), "example": ("gpu", example_text), "parts": ("compile", parts_text)}
    texts = {}
    for name in args.only.split(","):
        kind, text_of = tables[name]
        texts[name] = text_of(args.results or newest(kind), args.print)
    if args.print:
        return print("\n\n".join(texts.values()))
    for name, value in texts.items():
        put(name, value)


if __name__ == "__main__":
    main()
