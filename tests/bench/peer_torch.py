"""Runs the same training step, product and loading in PyTorch as bench_step.c, bench_gemm.c and bench_loader.c.

    python tests/bench/peer_torch.py step --model 124m --batch 4 --seq 64 --precision bf16 --compile --threads 2
    python tests/bench/peer_torch.py gemm --threads 2
    python tests/bench/peer_torch.py loader --workers 2

The model is GPT-2 as nanoGPT writes it: fused causal attention, tied weights, vocabulary padded to 50304, no dropout.  It
trains with fused AdamW, and in bf16 and fp16 with torch.autocast.  Prints the JSON lines of the C programs.  run.py calls
it.
"""
import argparse
import json
import platform
import statistics
import sys
import tempfile
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

# vocabulary, tokens in use, channels, heads, layers: those of bench_step.c
MODELS = {"124m": (50304, 50257, 768, 12, 12), "30m": (50304, 50257, 384, 6, 6), "11m": (256, 256, 384, 6, 6),
          "tiny": (256, 256, 64, 2, 2)}
POSITIONS = 1024


class Block(nn.Module):
    def __init__(self, channels, heads):
        super().__init__()
        self.heads = heads
        self.ln_1 = nn.LayerNorm(channels)
        self.c_attn = nn.Linear(channels, 3 * channels)
        self.attn_proj = nn.Linear(channels, channels)
        self.ln_2 = nn.LayerNorm(channels)
        self.c_fc = nn.Linear(channels, 4 * channels)
        self.mlp_proj = nn.Linear(4 * channels, channels)

    def forward(self, x):
        batch, seq, channels = x.shape
        q, k, v = (t.view(batch, seq, self.heads, channels // self.heads).transpose(1, 2)
                   for t in self.c_attn(self.ln_1(x)).split(channels, dim=2))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(heads.transpose(1, 2).contiguous().view(batch, seq, channels))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, vocab, channels, heads, layers):
        super().__init__()
        self.wte = nn.Embedding(vocab, channels)
        self.wpe = nn.Embedding(POSITIONS, channels)
        self.blocks = nn.ModuleList(Block(channels, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(channels)
        self.lm_head = nn.Linear(channels, vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids, labels):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.reshape(-1))


def line(event, **values):
    base = {"event": event, "who": "torch", "version": torch.__version__, "python": platform.python_version(),
            "threads": torch.get_num_threads()}
    print(json.dumps({**base, **values}), flush=True)


def adamw(model):
    """Weight decay on matrices only, as in nanoGPT."""
    params = list(model.parameters())
    groups = [{"params": [p for p in params if p.dim() == 2], "weight_decay": 0.1},
              {"params": [p for p in params if p.dim() != 2], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-4, fused=True)


def step(args):
    torch.manual_seed(1)
    vocab, tokens, channels, heads, layers = MODELS[args.model]
    model = GPT(vocab, channels, heads, layers)
    parameters = sum(p.numel() for p in model.parameters())
    optimizer = adamw(model)
    forward = torch.compile(model) if args.compile else model
    data = torch.randint(0, tokens, (8, args.batch * args.seq + 1))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.precision]
    times, parts = [], {"forward_ms": [], "backward_ms": [], "update_ms": []}
    for i in range(args.warmup + args.steps):
        row = data[i % 8]
        at = [time.perf_counter()]
        ids, labels = row[:-1].view(args.batch, args.seq), row[1:].view(args.batch, args.seq)
        with torch.autocast("cpu", dtype, enabled=args.precision != "fp32"):
            loss = forward(ids, labels)
        at.append(time.perf_counter())
        loss.backward()
        at.append(time.perf_counter())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        at.append(time.perf_counter())
        if i >= args.warmup:
            times.append(1e3 * (at[3] - at[0]))
            for k, name in enumerate(parts):
                parts[name].append(1e3 * (at[k + 1] - at[k]))
    median = statistics.median(times)
    line("step", mode="compile" if args.compile else "eager", model=args.model, parameters=parameters, batch=args.batch,
         seq=args.seq, precision=args.precision, steps=args.steps, warmup=args.warmup, median_ms=median,
         best_ms=min(times), tokens_per_s=args.batch * args.seq / median * 1e3, loss=loss.item(),
         **{name: statistics.median(values) for name, values in parts.items()})


def products(dtype):
    """The cases of bench_gemm.c that PyTorch has: the name without the dtype, and what computes it."""
    def numbers(*shape):
        return (torch.rand(*shape) - 0.5).to(dtype)
    a, b = numbers(1024, 1024), numbers(1024, 1024)
    x, fc, bias, dy = numbers(256, 768), numbers(3072, 768), numbers(3072), numbers(256, 3072)
    grad = torch.zeros(3072, 768)
    if dtype == torch.float32:
        yield "NN 1024^3", 1024 ** 3, lambda: a @ b
        yield "NT 1024^3", 1024 ** 3, lambda: a @ b.t()
        yield "linear 256x3072x768 NT bias gelu", dy.numel() * 768, lambda: F.gelu(F.linear(x, fc, bias), approximate="tanh")
        yield "dX 256x768x3072 NN", dy.numel() * 768, lambda: dy @ fc
    else:
        yield f"NT 1024^3 from {'bf16' if dtype == torch.bfloat16 else 'fp16'}, packed B", 1024 ** 3, lambda: a @ b.t()
        yield "linear 256x3072x768 packed, gelu", dy.numel() * 768, lambda: F.gelu(F.linear(x, fc, bias), approximate="tanh")
        yield "dX 256x768x3072 NN packed B", dy.numel() * 768, lambda: dy @ fc
    yield "dW 3072x768x256 TN beta 1", dy.numel() * 768, lambda: grad.add_(dy.t() @ x)


def gemm(args):
    """Four calls after one that is not timed, the median over rounds."""
    cases = [(f"{name} {case}", count, call) for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16))
             for case, count, call in products(dtype)]
    for name, count, call in cases:
        rates = []
        for _ in range(args.rounds + 1):
            call()
            start = time.perf_counter()
            for _ in range(4):
                call()
            rates.append(4 * 2 * count / (time.perf_counter() - start) * 1e-9)
        line("gemm", case=name, gflops=statistics.median(rates[1:]))


class Tokens(torch.utils.data.Dataset):
    """Inputs and targets from a memory-mapped token file, as nanoGPT's get_batch takes them."""

    def __init__(self, path, seq):
        self.data, self.seq = np.memmap(path, np.uint16, "r"), seq

    def __len__(self):
        return (len(self.data) - 1) // self.seq

    def __getitem__(self, i):
        piece = self.data[i * self.seq:(i + 1) * self.seq + 1].astype(np.int64)
        return torch.from_numpy(piece[:-1]), torch.from_numpy(piece[1:])


def loader(args):
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        np.random.default_rng(0).integers(0, 65536, args.tokens, dtype=np.uint16).tofile(file)
        file.flush()
        for workers in args.workers:
            start = time.perf_counter()
            batches = torch.utils.data.DataLoader(Tokens(file.name, args.seq), args.batch, shuffle=True,
                                                  num_workers=workers, drop_last=True)
            source = iter(batches)
            next(source)
            first, cpu, taken = time.perf_counter(), time.thread_time(), 0
            for _ in source:
                taken += 1
                if time.perf_counter() - first > args.seconds:
                    break
            seconds, cpu = time.perf_counter() - first, time.thread_time() - cpu
            closing = time.perf_counter()
            del source
            line("loader", batch=args.batch, seq=args.seq, workers=workers,
                 tokens_per_s=taken * args.batch * args.seq / seconds, cpu_us_per_batch=1e6 * cpu / taken,
                 first_batch_ms=1e3 * (first - start), close_ms=1e3 * (time.perf_counter() - closing))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    s = commands.add_parser("step")
    s.add_argument("--model", choices=MODELS, default="124m")
    s.add_argument("--batch", type=int, default=4)
    s.add_argument("--seq", type=int, default=64)
    s.add_argument("--precision", choices=["fp32", "bf16", "fp16"], default="bf16")
    s.add_argument("--compile", action="store_true")
    s.add_argument("--threads", type=int, default=2)
    s.add_argument("--steps", type=int, default=10)
    s.add_argument("--warmup", type=int, default=3)
    g = commands.add_parser("gemm")
    g.add_argument("--threads", type=int, default=2)
    g.add_argument("--rounds", type=int, default=15)
    r = commands.add_parser("loader")
    r.add_argument("--tokens", type=int, default=1 << 25)
    r.add_argument("--batch", type=int, default=32)
    r.add_argument("--seq", type=int, default=1024)
    r.add_argument("--seconds", type=float, default=2)
    r.add_argument("--workers", type=int, nargs="*", default=[0, 2])
    r.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    {"step": step, "gemm": gemm, "loader": loader}[args.command](args)


if __name__ == "__main__":
    sys.exit(main())
