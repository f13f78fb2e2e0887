"""Makes the golden data of tests/unit/t_scaler.c: PyTorch's loss scaler and kernels, and the rules of the other presets.

    python tests/torch/oracle/scaler.py        (writes tests/torch/golden/scaler.txt; --check only compares)

The same generator makes every trace on both sides, so only checksums and samples are stored.
"""
import io
import math
import struct

import numpy as np
import torch

import common

MASK = (1 << 64) - 1


class Random:
    """Knuth's MMIX generator, upper 31 bits; tests/unit/t_scaler.c has the same."""

    def __init__(self, seed):
        self.x = seed

    def below(self, n):
        self.x = (self.x * 6364136223846793005 + 1442695040888963407) & MASK
        return (self.x >> 33) % n


class Checksum:
    """FNV-1a over 64-bit words."""

    def __init__(self):
        self.h = 0xCBF29CE484222325

    def add(self, word):
        self.h = ((self.h ^ (word & MASK)) * 0x100000001B3) & MASK


def f32_bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def bits_of(tensor):
    return struct.unpack("<I", tensor.detach().float().numpy().tobytes())[0]


FOUND = [1.0, 2.0, float("nan"), float("inf"), -1.0]
GROWTH = [2.0, 1.0001, 1.5, 16.0]
BACKOFF = [0.5, 0.25, 0.9, 0.1]
INTERVAL = [1, 2, 3, 7, 2000]
RATE = [2, 5, 50, 1000]
START = [65536.0, 4.0, 1e38, 3.7e-38, 1e-44, 1.0, 3.0, 2.0 ** 127]


def update_trace(out, segments=110, events=1000):
    """torch._amp_update_scale_ with any found_inf."""
    rng = Random(1)
    for segment in range(segments):
        scale = torch.tensor(START[rng.below(len(START))], dtype=torch.float32)
        growth, backoff = GROWTH[rng.below(len(GROWTH))], BACKOFF[rng.below(len(BACKOFF))]
        interval, rate = INTERVAL[rng.below(len(INTERVAL))], RATE[rng.below(len(RATE))]
        tracker = torch.tensor(rng.below(interval + 2), dtype=torch.int32)
        check = Checksum()
        for _ in range(events):
            found = FOUND[rng.below(len(FOUND))] if rng.below(rate) == 0 else 0.0
            torch._amp_update_scale_(scale, tracker, torch.tensor(found), growth, backoff, interval)
            inverse = scale.double().reciprocal().float()
            check.add(bits_of(scale) << 32 | bits_of(inverse))
            check.add(int(tracker))
        out.write(f"update {segment} {bits_of(scale):08x} {int(tracker)} {check.h:016x}\n")


def unscale(out):
    """torch._amp_foreach_non_finite_check_and_unscale_, all dtypes and inverse scales.  NaN counts as NaN, whatever its bits."""
    n = 4099
    kinds = [("f32", torch.float32, np.uint32, 32, 0x7F800000), ("f64", torch.float64, np.uint64, 64, 0x7FF0000000000000),
             ("f16", torch.float16, np.uint16, 16, 0x7C00), ("bf16", torch.bfloat16, np.uint16, 16, 0x7F80)]
    inverses = [1.0, 0.25, 2.0 ** -16, 1 / 3, 2.0 ** 20, 2.0 ** -140, float("inf"), 0.0, float("nan")]
    for name, dtype, unsigned, width, exponent in kinds:
        for finite in (0, 1):
            for k, inverse in enumerate(inverses):
                rng = Random(100 + k)
                words = []
                for i in range(n):
                    w = 0
                    for _ in range(width // 16):
                        w = w << 16 | rng.below(65536)
                    if i % 16 == 0:     # a zero, a subnormal, the largest, infinities and NaN among the rest
                        special = rng.below(4)
                        w = [0, 1, exponent - 1, exponent][special] | (w & 1 << (width - 1))
                    if finite and w & exponent == exponent:
                        w &= ~(1 << (width - 2))
                    words.append(w)
                raw = np.array(words, dtype=unsigned)
                signed = {16: np.int16, 32: np.int32, 64: np.int64}[width]
                t = torch.from_numpy(raw.view(signed).copy()).view(dtype)
                found = torch.zeros(())
                torch._amp_foreach_non_finite_check_and_unscale_([t], found, torch.tensor(inverse, dtype=torch.float32))
                nan = torch.isnan(t).numpy()
                result = t.view({16: torch.int16, 32: torch.int32, 64: torch.int64}[width]).numpy().view(unsigned)
                check = Checksum()
                for w, bad in zip(result.tolist(), nan.tolist()):
                    check.add(1 if bad else w)
                out.write(f"unscale {name} {finite} {k} {int(found.item() != 0)} {check.h:016x}\n")


def scaler_trace(out, events=20000):
    """torch.amp.GradScaler with two optimizers, new scales and new rules in between, and calls in the wrong order."""
    rng = Random(7)
    params = [torch.zeros(3, requires_grad=True), torch.zeros(2, requires_grad=True)]
    opts = [torch.optim.SGD([p], lr=0.0) for p in params]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    scaler.scale(torch.zeros(()))
    check = Checksum()

    def grads():
        for p in params:
            kind = rng.below(12)
            p.grad = torch.tensor([float(rng.below(1000)) * 0.37 for _ in range(len(p))])
            if kind < 2:
                p.grad[rng.below(len(p))] = [float("inf"), float("nan")][kind]

    def attempt(call, *args):
        try:
            call(*args)
            check.add(0)
        except (RuntimeError, AssertionError):
            check.add(1)

    for event in range(events):
        op = rng.below(16)
        grads()
        if op < 9:                                  # an ordinary iteration, unscaling by hand or not
            for i in range(2):
                if rng.below(2):
                    attempt(scaler.unscale_, opts[i])
                attempt(scaler.step, opts[i])
            attempt(scaler.update)
        elif op == 9:
            attempt(scaler.update, float(2.0 ** (rng.below(40) - 10)))
        elif op == 10:
            scaler.set_growth_interval(1 + rng.below(5))
        elif op == 11:
            scaler.set_growth_factor(GROWTH[rng.below(len(GROWTH))])
            scaler.set_backoff_factor(BACKOFF[rng.below(len(BACKOFF))])
        elif op == 12:                              # one optimizer only, without a step
            attempt(scaler.unscale_, opts[rng.below(2)])
            attempt(scaler.update)
        elif op == 13:                              # everything twice
            i = rng.below(2)
            attempt(scaler.unscale_, opts[i])
            attempt(scaler.unscale_, opts[i])
            attempt(scaler.step, opts[i])
            attempt(scaler.unscale_, opts[i])
            attempt(scaler.step, opts[i])
            attempt(scaler.update)
            attempt(scaler.update)
        elif op == 14:                              # a check that is left lying
            attempt(scaler.unscale_, opts[rng.below(2)])
        else:
            attempt(scaler.update)
        check.add(bits_of(scaler._scale) << 32 | (int(scaler._growth_tracker) & 0xFFFFFFFF))
        for p in params:
            for x in p.grad.tolist():
                check.add(1 if math.isnan(x) else f32_bits(x))
        if (event + 1) % 500 == 0:
            out.write(f"scaler {event + 1} {bits_of(scaler._scale):08x} {int(scaler._growth_tracker)} {check.h:016x}\n")


# The other presets, written from the update rules of apex.amp.scaler, Megatron's grad_scaler, deepspeed's loss_scaler and
# fused_optimizer, fairseq's and metaseq's dynamic_loss_scaler, flax's dynamic_scale and TF 2's loss_scale_optimizer.

class Rule:
    def __init__(self, scale, window, floor=0.0, ceiling=math.inf, patience=1):
        self.s, self.w, self.floor, self.ceiling, self.h0, self.h = scale, window, floor, ceiling, patience, patience
        self.clean = 0

    def set(self, s):
        with np.errstate(over="ignore"):
            self.s = float(np.float32(s))


class Apex(Rule):
    def step(self, bad):
        if bad:
            self.set(max(self.s / 2, self.floor))
            self.clean = 0
        else:
            self.clean += 1
        if self.clean == self.w:
            self.set(min(self.ceiling, self.s * 2))
            self.clean = 0


class Megatron(Rule):
    def step(self, bad):
        if bad:
            self.clean = 0
            self.h -= 1
            if self.h <= 0:
                self.set(max(self.s * 0.5, self.floor))
        else:
            self.clean += 1
            if self.clean == self.w:
                self.clean, self.h = 0, self.h0
                self.set(self.s * 2)


class Iterations(Rule):
    """Scalers that keep the number of the iteration and of the last overflow."""

    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.i, self.last_bad, self.last_change, self.bad_count, self.tolerance = 0, -1, -1, 0, 0.0


class DeepSpeed(Iterations):
    def step(self, bad):
        if bad:
            if self.h0 == 1 or self.h == 1:
                self.set(max(self.s / 2, self.floor))
            else:
                self.h -= 1
            self.last_bad = self.i
        elif (self.i - self.last_bad) % self.w == 0:
            self.h = self.h0
            self.set(self.s * 2)
        self.i += 1


class DeepSpeedFused(Iterations):
    def step(self, bad):
        if bad:
            self.set(max(self.s / 2, self.floor))
            self.last_bad = self.i
        else:
            stable = self.i - self.last_bad - 1
            if stable > 0 and stable % self.w == 0:
                self.set(self.s * 2)
        self.i += 1


class Fairseq(Iterations):
    moving, inclusive = False, True

    def step(self, bad):
        if bad:
            before = self.s
            ratio = (self.bad_count + 1) / float(self.i - self.last_change)
            self.last_bad = self.i
            self.bad_count += 1
            if ratio >= self.tolerance:
                self.set(self.s / 2)
                if self.moving:
                    self.w = max(int(self.w / 2), 1)
                self.last_change, self.bad_count = self.i, 0
            if self.s < self.floor or (self.inclusive and self.s == self.floor):
                self.s = before
        elif (self.i - self.last_bad) % self.w == 0:
            self.set(self.s * 2)
            self.last_change = self.i
            if self.moving:
                self.w *= 2
        self.i += 1


class Metaseq(Fairseq):
    moving, inclusive = True, False


class Flax(Rule):
    def step(self, bad):
        grow = self.clean == self.w
        if bad:
            self.set(max(self.s * 0.5, self.floor))
        elif grow:
            self.set(min(self.s * 2, self.ceiling))
        self.clean = 0 if grow or bad else self.clean + 1


class Keras(Rule):
    def step(self, bad):
        if bad:
            self.set(max(self.s / 2, self.floor))
            self.clean = 0
        elif self.clean + 1 >= self.w:
            if self.s * 2 < 2.0 ** 128:
                self.set(self.s * 2)
            self.clean = 0
        else:
            self.clean += 1


class Torch(Rule):
    def step(self, bad):
        scale, tracker = torch.tensor(self.s, dtype=torch.float32), torch.tensor(self.clean, dtype=torch.int32)
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(bad)), 2.0, 0.5, self.w)
        self.s, self.clean = float(scale), int(tracker)


TINY, MAX = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def make(preset, window):
    """Number of amp_scaler_preset, or 60 for fairseq with tolerance 0.25; window 0 means the preset's."""
    w = window or {1: 2000, 2: 2000, 3: 1000, 4: 1000, 5: 1000, 6: 2000, 60: 2000, 7: 256, 8: 2000, 9: 2000}[preset]
    if preset == 1: return Torch(65536.0, w)
    if preset == 2: return Apex(65536.0, w, ceiling=2.0 ** 24)
    if preset == 3: return Megatron(2.0 ** 32, w, floor=1.0, patience=2)
    if preset == 4: return DeepSpeed(65536.0, w, floor=1.0, patience=2)
    if preset == 5: return DeepSpeedFused(65536.0, w, floor=1.0)
    if preset in (6, 60):
        rule = Fairseq(32768.0, w, floor=1e-4)
        rule.tolerance = 0.25 if preset == 60 else 0.0
        return rule
    if preset == 7: return Metaseq(4.0, w, floor=2.0 ** -5)
    if preset == 8: return Flax(65536.0, w, floor=TINY, ceiling=MAX)
    return Keras(32768.0, w, floor=1.0)


def presets(out, events=3000):
    for preset in (1, 2, 3, 4, 5, 6, 60, 7, 8, 9):
        for window in (0, 1, 2, 3, 10):
            for k, rate in enumerate([2, 4, 7, 12, 40, 700, 1000000]):
                rng = Random(1000 + k)
                rule, check = make(preset, window), Checksum()
                for _ in range(events):
                    rule.step(rng.below(rate) == 0)
                    check.add(f32_bits(rule.s) if math.isfinite(rule.s) else 0x7F800000)
                out.write(f"preset {preset} {window} {k} {f32_bits(rule.s) if math.isfinite(rule.s) else 0x7F800000:08x} {check.h:016x}\n")


if __name__ == "__main__":
    text = io.StringIO()
    update_trace(text)
    unscale(text)
    scaler_trace(text)
    presets(text)
    common.write_text("scaler.txt", text.getvalue())
