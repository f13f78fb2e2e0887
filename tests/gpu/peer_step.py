"""Trains train_gpt's GPT-2 in PyTorch, as nanoGPT does, from the same weights on the same tokens.

    echo RUN | python tests/gpu/peer_step.py --tokens tokens.bin --init init.safetensors --heads 12 --seq 1024

step.py calls it.  Each line of its input is a RUN: precision:mode:batch:steps[:profile], as bf16:compile:64:100.  It prints
JSON lines: the versions, then for each run the losses, the tokens per second of the steps after --warm, the peak memory,
and the times between which it trained.  With `profile`, it also prints where the GPU's time goes.  It uses fused causal
attention, fused AdamW, and autocast (GradScaler for fp16), and clips gradients to norm 1.
"""
import argparse
import json
import math
import os
import platform
import sys
import time

import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "bench"))
from peer_torch import GPT  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
BLOCK = {"ln_1": "ln_1", "ln_2": "ln_2", "attn.c_attn": "c_attn", "attn.c_proj": "attn_proj", "mlp.c_fc": "c_fc",
         "mlp.c_proj": "mlp_proj"}


def line(event, **values):
    print(json.dumps({"event": event, **values}), flush=True)


def safetensors(path):
    """The fp32 tensors of a file: after the header's length and the header as JSON their bytes."""
    with open(path, "rb") as f:
        data = bytearray(f.read())
    begin = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:begin].decode())
    header.pop("__metadata__", None)
    out = {}
    for name, entry in header.items():
        first, count = begin + entry["data_offsets"][0], math.prod(entry["shape"])
        out[name.removeprefix("transformer.")] = torch.frombuffer(data, dtype=torch.float32, count=count,
                                                                  offset=first).view(entry["shape"]).clone()
    return out


def model_of(weights, heads):
    """GPT-2 with these weights; the matrices of the blocks are stored as x @ w, nn.Linear's as x @ w.t()."""
    vocab, channels = weights["wte.weight"].shape
    layers = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("h."))
    model = GPT(vocab, channels, heads, layers)
    model.wpe = torch.nn.Embedding(*weights["wpe.weight"].shape)
    with torch.no_grad():
        for name, value in weights.items():
            if name == "lm_head.weight":
                continue
            if name.startswith("h."):
                _, layer, rest = name.split(".", 2)
                module, kind = rest.rsplit(".", 1)
                name, value = f"blocks.{layer}.{BLOCK[module]}.{kind}", value.t() if value.dim() == 2 else value
            model.get_parameter(name).copy_(value)
    return model


class Training:
    def __init__(self, args, weights, run):
        self.precision, self.mode, self.batch = run[0], run[1], int(run[2])
        self.args, self.device = args, args.device
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self.precision == "tf32"
        model = model_of(weights, args.heads).to(self.device)
        self.parameters = list(model.parameters())
        groups = [{"params": [p for p in self.parameters if p.dim() == 2], "weight_decay": 0.1},
                  {"params": [p for p in self.parameters if p.dim() != 2], "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), eps=1e-8, fused=True)
        self.scaler = torch.amp.GradScaler(self.device, init_scale=65536.0, enabled=self.precision == "fp16")
        self.forward = torch.compile(model) if self.mode == "compile" else model
        self.done = 0

    def tokens(self):
        """The batch of this step, as train_gpt takes it without shuffling, sent while the GPU still works."""
        n = self.batch * self.args.seq
        row = self.args.data[self.done * n:(self.done + 1) * n + 1].to(torch.int64)
        if self.device == "cuda":
            row = row.pin_memory().to(self.device, non_blocking=True)
        return row[:-1].view(self.batch, -1), row[1:].view(self.batch, -1)

    def step(self):
        """One optimizer step; the loss stays on the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.args.lr * min(1, (self.done + 1) / self.args.warmup)
        ids, labels = self.tokens()
        with torch.autocast(self.device, DTYPES.get(self.precision), enabled=self.precision in DTYPES):
            loss = self.forward(ids, labels)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0, foreach=True)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
        return loss.detach()

    def wait(self):
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.time()

    def kernels(self, steps=3):
        """Milliseconds of a step by kernel, the longest first."""
        from torch.profiler import ProfilerActivity, profile
        with profile(activities=[ProfilerActivity.CUDA if self.device == "cuda" else ProfilerActivity.CPU]) as profiler:
            for _ in range(steps):
                self.step()
            self.wait()
        found = []
        for event in profiler.key_averages():
            spent = getattr(event, "self_device_time_total" if self.device == "cuda" else "self_cpu_time_total", 0)
            if spent > 0:
                found.append([event.key[:100], round(spent / 1e3 / steps, 4), event.count // steps])
        return sorted(found, key=lambda row: -row[1])[:30]


def train(args, weights, run):
    steps = int(run[3])
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    training = Training(args, weights, run)
    warm = min(args.warm, steps // 3)
    losses = [training.step() for _ in range(warm)]
    begin = training.wait()
    losses += [training.step() for _ in range(steps - warm)]
    end = training.wait()
    tokens = training.batch * args.seq * (steps - warm)
    found = {"parameters": sum(p.numel() for p in training.parameters), "steps": steps, "begin": begin, "end": end,
             "tokens_per_s": tokens / (end - begin), "losses": [round(x, 6) for x in torch.stack(losses).float().tolist()]}
    if args.device == "cuda":
        found["peak_mib"] = torch.cuda.max_memory_allocated() / 2 ** 20
        found["reserved_mib"] = torch.cuda.max_memory_reserved() / 2 ** 20
    if "profile" in run[4:]:
        found["kernels"] = training.kernels()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tokens", required=True, help="16-bit numbers")
    parser.add_argument("--init", required=True)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--seq", type=int, required=True)
    parser.add_argument("--lr", type=float, default=6e-4)
    parser.add_argument("--warmup", type=int, default=10, help="steps in which the learning rate rises")
    parser.add_argument("--warm", type=int, default=10, help="steps that are not timed")
    args = parser.parse_args()
    args.data = torch.from_file(args.tokens, dtype=torch.uint16, size=os.path.getsize(args.tokens) // 2)
    weights = safetensors(args.init)
    line("versions", torch=torch.__version__, cuda=torch.version.cuda, python=platform.python_version())
    for text in iter(sys.stdin.readline, ""):
        run = text.strip().split(":")
        name = {"precision": run[0], "mode": run[1], "batch": int(run[2])}
        try:
            line("begin", **name)
            line("run", **name, **train(args, weights, run))
        except Exception as error:                          # too little memory for one leaves the others
            why = str(error).strip().splitlines() or [type(error).__name__]
            line("run", **name, skipped=why[0][:200])
        torch._dynamo.reset()
        if args.device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
