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


def step_table(steps, precision):
    """Tokens per second; behind each peer how many times as fast amp.h is."""
    ours = f"amp.h {precision}"
    peers = [(f"torch eager {precision}", "PyTorch eager"), (f"torch compile {precision}", "PyTorch compiled")]
    if precision == "fp32":
        peers += [("llm.c", "llm.c"), ("llm.c with BLAS", "llm.c with OpenBLAS")]
    else:
        peers += [("amp.h fp32", "own fp32")]

    def cell(row, name):
        program, ratio = row["programs"].get(name, {}), row["ratios"].get(f"{ours} / {name}")
        if "tokens_per_s" not in program:
            return "-"
        return f"{program['tokens_per_s']:,.0f}" + (f" ({ratio:.2f}x)" if isinstance(ratio, (int, float)) else "")

    rows = [[f"{MODELS.get(row['model'], row['model'])}, B={row['batch']}, T={row['seq']}", cell(row, ours)]
            + [cell(row, name) for name, _ in peers] for row in steps]
    used = [k for k in range(len(peers) + 2) if k < 2 or any(row[k] != "-" for row in rows)]
    head = [f"tokens/s, {precision}", "amp.h"] + [title for _, title in peers]
    yield from table([head[k] for k in used], [[row[k] for k in used] for row in rows])
    yield ""


def number(value):
    return "-" if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def lines(results, name):
    m, v = results["machine"], results["versions"]
    peers = f", PyTorch {v['torch']}" if "torch" in v else ""
    yield (f"{m['cpu']}, {m['cores']} cores, kernels {m['path']}, {results['settings']['threads']} threads, gcc "
           f"{v.get('compiler', '-')}{peers}; {results['date']}; `make bench`, all programs in turn, medians of "
           f"{results['settings']['rounds']} rounds, [{name}](tests/bench/results/{name}). In brackets: amp.h's "
           "speed over that program's.")
    yield ""
    if isinstance(results.get("step"), list):
        for precision in ("fp32", "bf16"):
            yield from step_table(results["step"], precision)
    other = [row for row in results["bars"] if not row["bar"].startswith("step ")]
    if other:
        yield from table(["GEMM and loader", "measured", "bar", ""],
                         [[row["bar"], number(row["measured"]), row.get("needs", ""), row["verdict"]] for row in other])
        yield ""
    failed = [row["bar"] for row in results["bars"] if row["verdict"] == "FAIL"]
    passed = sum(row["verdict"] == "PASS" for row in results["bars"])
    text = f"{passed} of {len(results['bars'])} bars are met"
    yield text + (f"; below: {'; '.join(failed)}." if failed else ".")


def main():
    arguments = [a for a in sys.argv[1:] if a != "--print"]
    path = arguments[0] if arguments else newest()
    with open(path) as f:
        results = json.load(f)
    text = "\n".join(lines(results, os.path.basename(path)))
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
