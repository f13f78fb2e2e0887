"""Writes README.md's tables of speed and accuracy from the newest results of run.py, between the markers

    <!-- bench:begin -->
    <!-- bench:end -->

    python3 tests/bench/table.py [--print] [results.json]

`make readme` calls it.  Results of a machine on which something else was running are refused.
"""
import glob
import json
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
BEGIN, END = "<!-- bench:begin -->", "<!-- bench:end -->"
MODELS = {"124m": "GPT-2 124M", "30m": "30M", "11m": "11M bytes"}
BUSY = 0.06


def newest(kind):
    found = []
    for path in glob.glob(os.path.join(HERE, "results", kind + "-*.json")):
        with open(path) as f:
            found.append((json.load(f)["date"], path))
    if not found:
        sys.exit(f"no {kind} results in tests/bench/results: run make bench and make accuracy")
    return max(found)[1]


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


def accuracy_table(rows):
    """Mean and worst error of the tests' figures: a line per subject, a column per precision."""
    found = {}
    for row in rows:
        subject, precision = row["figure"].rsplit(", ", 1)
        unit = "" if row["bound"] > 1 else "relative "
        found.setdefault(subject, {})[precision] = f"{unit}{row['mean']:.2g} / {row['worst']:.3g}"
    columns = ("fp32", "bf16", "fp16")
    yield from table(["error, mean / worst"] + list(columns),
                     [[subject] + [cells.get(c, "") for c in columns] for subject, cells in found.items()])
    yield ""


def number(value):
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def lines(results, name, accuracy, accuracy_name):
    m, v = results["machine"], results["versions"]
    peers = f", PyTorch {v['torch']}" if "torch" in v else ""
    yield (f"{m['cpu']}, {m['cores']} cores, kernels {m['path']}, {results['settings']['threads']} threads, gcc "
           f"{v.get('compiler', '-')}{peers}; {results['date']}; `make bench`, all programs in turn, medians of "
           f"{results['settings']['rounds']} rounds, [{name}](tests/bench/results/{name}). In brackets: amp.h's "
           "speed over that program's.")
    yield ""
    if isinstance(results.get("step"), list):
        yield from step_table(results["step"])
    other = [row for row in results["bars"] if not row["bar"].startswith("step ")]
    if other:
        yield from table(["GEMM and loader", "measured", "bar", ""],
                         [[row["bar"], number(row["measured"]), row.get("needs", ""), row["verdict"]] for row in other])
        yield ""
    passed = sum(row["verdict"] == "PASS" for row in results["bars"])
    yield f"{passed} of {len(results['bars'])} bars are met, those of the training steps included."
    yield ""
    yield ("The tests' errors over PyTorch's own on the same data, both against fp64 (RMS over 16 seeds; at most 1.2 is "
           f"allowed; fp32 models: relative, at most 1e-5); `make accuracy`, [{accuracy_name}]"
           f"(tests/bench/results/{accuracy_name}).")
    yield ""
    yield from accuracy_table(accuracy["accuracy"])


def main():
    arguments = [a for a in sys.argv[1:] if a != "--print"]
    path, errors = arguments[0] if arguments else newest("cpu"), newest("accuracy")
    with open(path) as f:
        results = json.load(f)
    with open(errors) as f:
        accuracy = json.load(f)
    text = "\n".join(lines(results, os.path.basename(path), accuracy, os.path.basename(errors))).rstrip()
    if "--print" in sys.argv:
        return print(text)
    busy = results["machine"]["used_by_others"]["median"]
    if busy > BUSY:
        sys.exit(f"{os.path.basename(path)}: other programs used {busy:.0%} of the machine: measure again")
    readme = os.path.join(ROOT, "README.md")
    with open(readme) as f:
        old = f.read()
    if old.count(BEGIN) != 1 or old.count(END) != 1:
        sys.exit(f"README.md needs one {BEGIN} and one {END}")
    with open(readme, "w") as f:
        f.write(old.split(BEGIN)[0] + BEGIN + "\n" + text + "\n" + END + old.split(END)[1])


if __name__ == "__main__":
    main()
