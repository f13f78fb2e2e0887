"""Runs the training step of peer_torch.py on several processes, with PyTorch's DistributedDataParallel and gloo.

    python tests/bench/peer_ddp.py --model 11m --batch 4 --seq 256 --steps 6 --warmup 2

It trains in fp32, eager, with fused AdamW and without dropout.  Gradients are views of buckets of 25 MB.  Each rank has
--batch sequences, and the model has --seq positions, as in train_gpt.  Each rank reads its loss in each step.  Prints rank
0's seconds of each step after the warm-up.  ddp.py calls it.
"""
import argparse
import os
import socket
import sys
import time

import torch
import torch.multiprocessing
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

sys.path[:0] = [os.path.dirname(os.path.abspath(__file__))]
import peer_torch                                               # noqa: E402


def train(rank, args, port):
    torch.set_num_threads(args.threads)
    distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=args.ranks)
    torch.manual_seed(1)
    peer_torch.POSITIONS = args.seq
    vocab, tokens, channels, heads, layers = peer_torch.MODELS[args.model]
    model = peer_torch.GPT(vocab, channels, heads, layers)
    wrapped, optimizer = DistributedDataParallel(model, gradient_as_bucket_view=True), peer_torch.adamw(model)
    torch.manual_seed(2 + rank)
    data = torch.randint(0, tokens, (8, args.batch * args.seq + 1))
    seconds = []
    for i in range(args.warmup + args.steps):
        began = time.perf_counter()
        row = data[i % 8]
        loss = wrapped(row[:-1].view(args.batch, args.seq), row[1:].view(args.batch, args.seq))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = loss.item()
        if i >= args.warmup:
            seconds.append(round(time.perf_counter() - began, 6))
    if rank == 0:
        peer_torch.line("ddp", model=args.model, parameters=sum(p.numel() for p in model.parameters()), ranks=args.ranks,
                        batch=args.batch, seq=args.seq, warmup=args.warmup, seconds=seconds, loss=loss)
    distributed.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=peer_torch.MODELS, default="11m")
    for flag, value in (("batch", 4), ("seq", 256), ("steps", 6), ("warmup", 2), ("ranks", 2), ("threads", 1)):
        parser.add_argument(f"--{flag}", type=int, default=value)
    args = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.start_processes(train, (args, port), nprocs=args.ranks, start_method="fork")


if __name__ == "__main__":
    main()
