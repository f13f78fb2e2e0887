"""Measures in PyTorch what bench_data.cu measures of the loader: copies from pinned and pageable memory, DataLoader with
pin_memory.

    python tests/gpu/peer_data.py [--device cuda] [--tiny]

Prints JSON lines.  run.py calls it.
"""
import argparse
import json
import statistics
import time

import torch


def line(event, **values):
    print(json.dumps({"event": event, **values}), flush=True)


def sync(device):
    if device == "cuda":
        torch.cuda.synchronize()


def timed(device, count, call, rounds=5):
    """Seconds of a call, the GPU's work included."""
    call()
    found = []
    for _ in range(rounds):
        sync(device)
        begin = time.perf_counter()
        for _ in range(count):
            call()
        sync(device)
        found.append((time.perf_counter() - begin) / count)
    return statistics.median(found)


def copies(args):
    size = 1 << 16 if args.tiny else 64 << 20
    pageable = torch.ones(size, dtype=torch.uint8)
    pinned = pageable.pin_memory() if args.device == "cuda" else pageable.clone()
    to = torch.empty(size, dtype=torch.uint8, device=args.device)
    for name, source in (("pinned", pinned), ("pageable", pageable)):
        each = timed(args.device, 4, lambda source=source: to.copy_(source, non_blocking=True))
        line("torch copy", **{"from": name}, bytes=size, gb_per_s=round(1e-9 * size / each, 3))
    each = timed(args.device, 4, pageable.pin_memory if args.device == "cuda" else pageable.clone)
    line("torch pin_memory", bytes=size, gb_per_s=round(1e-9 * size / each, 3))


class Tokens(torch.utils.data.Dataset):
    """Sequences of 1024 tokens and the same shifted by one, as nanoGPT takes them from memory."""
    def __init__(self, seq, samples):
        self.seq, self.data = seq, torch.randint(0, 65536, (samples * seq + 1,), dtype=torch.int32)
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, i):
        row = self.data[i * self.seq:(i + 1) * self.seq + 1]
        return row[:-1], row[1:]


def next_times(args, workers):
    seq, batch, calls = (16, 2, 3) if args.tiny else (1024, 64, 60)
    data = Tokens(seq, batch * (calls + 10))
    loader = torch.utils.data.DataLoader(data, batch, shuffle=True, num_workers=workers, pin_memory=args.device == "cuda")
    work = torch.ones(64 if args.tiny else 8192, 64 if args.tiny else 8192, device=args.device,
                      dtype=torch.bfloat16)
    times, batches = [], iter(loader)
    for i in range(calls):
        work @ work
        begin = time.perf_counter()
        ids, labels = next(batches)
        ids, labels = ids.to(args.device, non_blocking=True), labels.to(args.device, non_blocking=True)
        if i >= calls // 6:
            times.append(1e6 * (time.perf_counter() - begin))
        sync(args.device)
    line("torch next", workers=workers, median_us=round(statistics.median(times), 2), worst_us=round(max(times), 2), calls=len(times))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    copies(args)
    for workers in (0, 1, 4):
        next_times(args, workers)


if __name__ == "__main__":
    main()
