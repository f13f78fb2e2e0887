"""Makes random programs of scaler calls and autocast regions, with PyTorch's results, for t_differential.c.

    python tests/torch/oracle/fuzz_logic.py                            (writes tests/torch/golden/fuzz_logic.txt; --check compares)
    python tests/torch/oracle/fuzz_logic.py --seed 7 --out FILE        (the large corpus of `make differential`)

Scaler programs call torch.amp.GradScaler("cpu") through all of its methods.  They have one or two scalers, up to four
optimizers (plain and fused SGD, and gradient sets of every dtype), up to three losses, and real backward passes.  A line
has one call and its results: the number of the amp_result that stands for PyTorch's exception, the scale's bits, the growth
tracker, and a hash of every gradient and weight.

Autocast programs call torch.autocast in up to five threads, on the states of "cuda" and "cpu", which are amp.h's two
contexts (PyTorch keeps the state of "cuda" without a GPU).  The dtypes that operators return come from autocast.txt, which
has PyTorch's decisions.  Forwards and backwards of linear run directly on "cpu", and as explicit casts on "cuda".

Preset programs run several scalers at once by the rules in scaler.py.  The first one is the table of presets compared.

DIFFERENCES and NOT_MET say where amp.h differs on purpose, and what PyTorch does not define.
"""
import collections
import io
import logging
import os
import pickle
import queue
import struct
import sys
import threading
import warnings

import torch

import autocast
import common
import scaler as rules
from scaler import Checksum, Random, bits_of, f32_bits

# Name: what differs.  Programs meet each of them (the number is counted), and then agree on a new scale and go on.
DIFFERENCES = {
    "set_rule": "set_growth_factor, set_backoff_factor and set_growth_interval take anything, a shrinking growth "
                "included; amp_scaler_set_rule refuses what is no growth, backoff or interval",
    "disabled": "a disabled scaler accepts unscale_, step and update in any order; in amp.h it averages, so it keeps the "
                "stages",
    "foreign": "an optimizer may be unscaled by two scalers in one iteration, and is then unscaled twice (a disabled one "
               "does nothing); amp.h refuses",
    "no_gradients": "unscale_ of an optimizer without gradients records nothing, so step and update raise "
                    "AssertionError; in amp.h an empty set counts as checked",
    "missing": "load_state_dict raises KeyError on a missing entry, with the scale already replaced; amp_scaler_load is "
               "all or nothing",
    "stages_kept": "load_state_dict leaves the optimizers' stages; amp_scaler_load makes every set ready",
    "mid_iteration": "state_dict and pickle leave out what unscale_ found (pickle asserts); amp_scaler_save keeps it",
    "bad_scale": "update(new_scale) takes any number; presets but AMP_SCALER_TORCH refuse one whose inverse is not normal",
    "not_begun": "unscale_, step and update raise AssertionError before the first scale(); amp.h's scaler begins at once",
    "backward_inside": "a region open during backward casts backward's own products, which PyTorch's manual advises "
                       "against; amp.h's backward obeys its forward's record anywhere",
    "end_alone": "leaving a region that is not the innermost is impossible in PyTorch (`with`), and refused by amp.h",
}
NOT_MET = [
    "closures and step's arguments",
    "tensors on several devices",
    "sparse gradients",
    "new_scale as an int (an AttributeError)",
    "getters of a disabled scaler (AttributeError)",
    "a growth interval beyond int32",
    "fused optimizers at scales that are no powers of two (they divide by the scale; all others multiply by its inverse)",
    "a disabled scaler's gradients under amp.h's own optimizer without .apply_nonfinite",
    "one autocast object entered twice (PyTorch then stays in the region for ever)",
    "a region in a region of cache_enabled=False that turns the cache on again",
    "operators on mixed dtypes that PyTorch refuses outside of a region",
    "TF32 regions",
    "regions nested deeper than 32",
    "presets: hysteresis that every clean update refills (apex's update_scale_hysteresis, DeepSpeed's consecutive_hysteresis), "
    "which amp.h does not offer: under alternating overflows the scale never shrinks",
]

OK, UNSCALED, STEPPED, NO_CHECK, GRAD_16BIT = 0, 204, 205, 206, 203
SCALE, RANGE, STATE, NAME, MISMATCH = 202, 102, 106, 107, 408

# Words of PyTorch's exceptions, and the amp_result that says the same.
ERRORS = [("unscale_() has already been called", UNSCALED), ("unscale_() is being called after step()", STEPPED),
          ("step() has already been called", STEPPED), ("No inf checks were recorded prior to update", NO_CHECK),
          ("Attempting to unscale FP16 gradients", GRAD_16BIT), ("The source state dict is empty", MISMATCH)]

DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}
GROWTH, BACKOFF = rules.GROWTH, rules.BACKOFF
NAN32 = 0x7FC00000


def canonical32(x):
    """The bits of an fp32 number; every NaN is the same."""
    bits = bits_of(x) if isinstance(x, torch.Tensor) else f32_bits(x)
    return NAN32 if bits & 0x7FFFFFFF > 0x7F800000 else bits


def f64_bits(x):
    return struct.unpack("<Q", struct.pack("<d", x))[0]


def value(rng):
    """A multiple of 0.37, in fp32."""
    return struct.unpack("<f", struct.pack("<f", (rng.below(2001) - 1000) * 0.37))[0]


BAD = [None, float("inf"), float("nan"), float("-inf")]


# ---- Scaler programs

class Optimizer:
    """kind: sgd, fused, or range (gradients only).  fresh: gradients are the same in both programs; after a call that
    reads them only (amp.h) or writes them unscaled (PyTorch) they are not, until they are made anew.  read: and the next
    step will multiply them, so that they cannot be made anew before it."""

    def __init__(self, kind, shapes, lr, rng):
        self.kind, self.shapes, self.fresh, self.read, self.owner = kind, shapes, True, False, None
        self.params = [torch.zeros(n, dtype=DTYPES[d], requires_grad=True) for d, n in shapes]
        self.set_weights(rng)
        self.torch = torch.optim.SGD(self.params, lr=lr, fused=True if kind == "fused" else None)
        self.dtypes = [d for d, _ in shapes]

    def set_weights(self, rng):
        with torch.no_grad():
            for p in self.params:
                if self.kind != "range":
                    p.copy_(torch.tensor([value(rng) for _ in range(len(p))]))

    def has_gradients(self):
        return any(p.grad is not None for p in self.params)


class ScalerProgram:
    def __init__(self, out, counts, rng, number):
        self.out, self.counts, self.rng, self.events = out, counts, rng, 0
        self.preset = "torch" if rng.below(10) < 7 else "default"
        self.pow2 = rng.below(3) == 0
        self.saved = {}
        out.write(f"program {number} {self.preset}\n")
        self.optimizers = [self.make_optimizer() for _ in range(1 + rng.below(4))]
        self.scalers = [self.make_scaler() for _ in range(1 + (rng.below(4) == 0))]
        self.dirty = [False] * len(self.scalers)
        self.stages = [{} for _ in self.scalers]            # of a disabled scaler's optimizers, in amp.h
        self.checked = [False] * len(self.scalers)          # and whether it may update

    def pick(self, values):
        return values[self.rng.below(len(values))]

    # -- Making

    def make_optimizer(self):
        rng = self.rng
        kind = self.pick(["sgd", "sgd", "sgd", "range"] + (["fused"] if self.pow2 else ["sgd"]))
        if kind == "range":
            dtypes = ["fp32", "fp64"] if rng.below(2) else ["fp32", "fp64", "bf16", "fp16"]
            shapes = [(self.pick(dtypes), 1 + rng.below(3)) for _ in range(1 + rng.below(3))]
        else:
            shapes = [("fp32", 1 + rng.below(4)) for _ in range(1 + rng.below(3))]
        lr, seed = self.pick([1.0, 0.125]), rng.below(1 << 30)
        o = Optimizer(kind, shapes, lr, Random(seed))
        self.out.write(f"optimizer {kind} {f32_bits(lr):08x} {seed} {len(shapes)}")
        self.out.write("".join(f" {d} {n}" for d, n in shapes) + "\n")
        if kind == "range":
            self.fill(o, 1, 0)
        return o

    def new_scale(self):
        rng = self.rng
        if self.pow2 or self.preset == "default" or rng.below(3):
            scale = 2.0 ** (rng.below(40) - (0 if self.preset == "default" else 12))
            return scale if self.pow2 or rng.below(2) else scale * 1.25
        return self.pick([65536.0, 4.0, 1e38, 3.7e-38, 1e-44, 3.0, 2.0 ** 127, 0.0, -4.0, -1e38, float("inf"), float("nan")])

    def make_scaler(self):
        growth = self.pick([2.0, 4.0] if self.pow2 else GROWTH)
        backoff = self.pick([0.5, 0.25] if self.pow2 else BACKOFF)
        interval = self.pick([1, 2, 3, 7, 20])
        enabled, scale = self.rng.below(12) > 0, self.new_scale() or 1.0
        scale = float(torch.tensor(scale, dtype=torch.float32))
        s = torch.amp.GradScaler("cpu", init_scale=scale, growth_factor=growth, backoff_factor=backoff,
                                 growth_interval=interval, enabled=enabled)
        assert s.get_scale() == (scale if enabled else 1.0) or scale != scale
        self.begin(s)
        self.out.write(f"scaler {f32_bits(scale):08x} {f64_bits(growth):016x} {f64_bits(backoff):016x} {interval} "
                       f"{int(enabled)}\n")
        return s

    def begin(self, s):
        """A scaler exists from its first scale() on."""
        if s.is_enabled():
            for call in (lambda: s.unscale_(self.optimizers[0].torch), lambda: s.step(self.optimizers[0].torch), s.update):
                try:
                    call()
                    raise SystemError("PyTorch accepts a scaler that was not begun")
                except AssertionError:
                    self.counts["differs_not_begun"] += 1
        s.scale(torch.zeros(()))

    # -- Writing

    def hash(self):
        check = Checksum()
        for o in self.optimizers:
            for p in o.params:
                if o.kind != "range":
                    for x in p.detach().view(torch.int32).tolist():
                        x &= 0xFFFFFFFF
                        check.add(NAN32 if x & 0x7FFFFFFF > 0x7F800000 else x)
                if o.fresh and p.grad is not None:
                    for x in p.grad.double().tolist():
                        check.add(1 if x != x else f64_bits(x))
        return (check.h >> 32 ^ check.h) & 0xFFFFFFFF

    def line(self, text, i, result=OK, extra=""):
        s = self.scalers[i]
        scale = canonical32(s._scale) if s.is_enabled() else 0x3F800000
        self.out.write(f"{text} = {result} {scale:08x} {s._get_growth_tracker()} {self.hash():08x}{extra}\n")
        self.events += 1
        letter = text.split()[0]
        self.counts["scaler_" + letter] += 1
        self.counts["scaler_calls"] += letter not in "zgxw"
        if result:
            self.counts[f"result_{result}"] += 1

    def attempt(self, call, *args):
        try:
            call(*args)
            return OK
        except (RuntimeError, AssertionError, ValueError) as e:
            for words, result in ERRORS:
                if words in str(e):
                    return result
            raise

    # -- Gradients

    def fill(self, o, seed, bad):
        """The gradients of a range set, whole numbers that every dtype holds; a bad one in the first range."""
        rng = Random(seed)
        for p in o.params:
            g = [float(rng.below(255) - 127) * 2.0 ** (rng.below(8) - 4) for _ in range(len(p))]
            if bad:
                g[rng.below(len(p))] = BAD[bad]
                bad = 0
            p.grad = torch.tensor(g, dtype=torch.float64).to(p.dtype)

    def backward(self, i, joint):
        """Losses sum(p c) over some parameters; jointly in one backward pass, or one after the other."""
        s, seed, losses = self.scalers[i], self.rng.below(1 << 30), 1 + self.rng.below(2 if joint else 3)
        bad = 1 + self.rng.below(3) if self.rng.below(6) == 0 else 0
        rng, outputs, left = Random(seed), [], bad
        for _ in range(losses):
            loss = torch.zeros((), requires_grad=True) * 1.0
            for o in self.optimizers:
                for p in o.params:
                    if o.kind == "range" or not o.fresh or rng.below(5) == 0:
                        continue
                    c = [value(rng) for _ in range(len(p))]
                    if left:
                        c[rng.below(len(p))] = BAD[left]
                        left = 0
                    loss = loss + (p * torch.tensor(c)).sum()
            outputs.append(loss)
        if joint:
            torch.autograd.backward(s.scale(self.pick([list, tuple])(outputs)))
        else:
            for loss in outputs:
                s.scale(loss).backward()
        self.line(f"b {i} {seed} {losses} {bad} {int(joint)}", i)

    def renew(self, k):
        """Gradients that are no longer the same go, so that the next backward pass makes them."""
        o = self.optimizers[k]
        if o.kind != "range" and not o.read:
            o.torch.zero_grad(set_to_none=True)
            o.fresh = True
            self.line(f"z {k}", 0)

    def make_gradients(self, i):
        for k, o in enumerate(self.optimizers):
            if o.kind == "range":
                if self.rng.below(2):
                    seed, bad = self.rng.below(1 << 30), 1 + self.rng.below(3) if self.rng.below(8) == 0 else 0
                    self.fill(o, seed, bad)
                    self.line(f"g {k} {seed} {bad}", 0)
            elif o.has_gradients() and (not o.fresh or self.rng.below(4) == 0):
                self.renew(k)
        self.backward(i, self.rng.below(2) == 1)

    # -- Calls

    def agree(self, i):
        """update(new_scale): the same scale, every optimizer ready."""
        s, scale = self.scalers[i], self.new_scale()
        as_tensor = self.rng.below(2) == 1
        scale = float(torch.tensor(scale, dtype=torch.float32))
        result = self.attempt(s.update, torch.tensor(scale) if as_tensor else scale)
        self.release(i)
        self.line(f"N {i} {f32_bits(scale):08x}", i, result)

    def release(self, i):
        self.dirty[i] = self.checked[i] = False
        self.stages[i].clear()
        for o in self.optimizers:
            if o.owner == i:
                o.owner, o.read = None, False

    def in_range(self, i):
        """Before calls whose outcome depends on the scale: where only some can go on alike, a moderate one."""
        s = self.scalers[i]
        if not s.is_enabled():
            return
        if self.preset == "torch" and not self.pow2:
            return
        low, high = (2.0 ** -60, 2.0 ** 60) if self.preset == "torch" else (1.0, 2.0 ** 126)
        while not (low <= s.get_scale() * s.get_backoff_factor() and s.get_scale() * s.get_growth_factor() <= high):
            self.agree(i)

    def usable(self, i, k):
        """The optimizer's gradients can be checked: there are some, and no other scaler has them."""
        o = self.optimizers[k]
        if o.owner is not None and o.owner != i:
            self.refused(f"foreign {i} {k}", i, STATE, "foreign")
            return False
        if not o.fresh and not self.stage(i, k):            # PyTorch has unscaled them, amp.h has not
            return False
        if not o.has_gradients():
            if self.scalers[i].is_enabled() and not self.stage(i, k):
                self.no_gradients(i, k)
            return False
        if "fp16" in o.dtypes and self.preset == "default":
            return False
        return True

    def stage(self, i, k):
        s = self.scalers[i]
        if not s.is_enabled():
            return self.stages[i].get(k, 0)
        states = s._per_optimizer_states
        key = id(self.optimizers[k].torch)
        return states[key]["stage"].value if key in states else 0

    def refused(self, text, i, result, name):
        self.counts["differs_" + name] += 1
        self.line("! " + text, i, result)

    def no_gradients(self, i, k):
        s, o = self.scalers[i], self.optimizers[k].torch
        s.unscale_(o)
        try:
            s.step(o)
            if self.optimizers[k].kind != "fused":
                raise SystemError("PyTorch steps without a gradient")
        except AssertionError:
            self.counts["differs_no_gradients"] += 1
        self.line(f"n {i} {k}", i)
        self.agree(i)

    def enter(self, i, k, result, stage):
        """In amp.h a disabled scaler, too, has the sets that it checked until its update."""
        if result == OK:
            self.optimizers[k].owner, self.dirty[i] = i, self.scalers[i].is_enabled()
            self.stages[i][k], self.checked[i] = stage, True

    def disabled_refuses(self, text, i, result):
        """What amp.h refuses of a disabled scaler as of an enabled one, and PyTorch does not."""
        if self.scalers[i].is_enabled() or result == OK:
            return False
        self.refused(text, i, result, "disabled")
        return True

    def unscale(self, i, k, read):
        """u: unscale_.  r: amp_scaler_check that only reads, and the step multiplies."""
        o = self.optimizers[k]
        self.in_range(i)
        if not self.usable(i, k):
            return
        if self.disabled_refuses(f"check {i} {k}", i, [OK, UNSCALED, STEPPED][self.stage(i, k)]):
            return
        read = read and o.kind != "range" and self.scalers[i].is_enabled()
        result = self.attempt(self.scalers[i].unscale_, o.torch)
        self.enter(i, k, result, 1)
        if read and result == OK:
            o.fresh, o.read = False, True
        self.line(f"{'r' if read else 'u'} {i} {k}", i, result)

    def step(self, i, k, how):
        """t: unscale_ and step.  T: amp_optimizer_step alone.  a: amp_step, which updates too."""
        o, s = self.optimizers[k], self.scalers[i]
        self.in_range(i)
        if o.kind == "range" or not self.usable(i, k):
            return
        if self.disabled_refuses(f"step {i} {k}", i, [OK, OK, STEPPED][self.stage(i, k)]):
            return
        if how == "t" and o.kind == "fused" and self.stage(i, k) == 0 and s.is_enabled():
            how = "T"
        ready = self.stage(i, k) == 0 and s.is_enabled()
        result = self.attempt(s.step, o.torch)
        self.enter(i, k, result, 2)
        if how == "a" and result == OK:
            result = self.attempt(s.update)
            self.release(i)
        stale, o.read = ready and how != "t", False
        if stale:
            o.fresh = False
        self.line(f"{how} {i} {k}", i, result, " stale" if stale else "")

    def update(self, i):
        self.in_range(i)
        if self.disabled_refuses(f"update {i} 0", i, OK if self.checked[i] else NO_CHECK):
            return
        result = self.attempt(self.scalers[i].update)
        if result == OK:
            self.release(i)
        self.line(f"U {i}", i, result)

    def set_rule(self, i):
        s = self.scalers[i]
        if not s.is_enabled():
            return
        what = self.rng.below(4)
        if what == 0:
            s.set_growth_factor(self.pick([2.0, 4.0] if self.pow2 else GROWTH))
            self.line(f"f {i} {f64_bits(s.get_growth_factor()):016x}", i)
        elif what == 1:
            s.set_backoff_factor(self.pick([0.5, 0.25] if self.pow2 else BACKOFF))
            self.line(f"k {i} {f64_bits(s.get_backoff_factor()):016x}", i)
        elif what == 2:
            interval = self.pick([1, 2, 3, 7, 20, -1])
            if self.preset == "default" and interval <= s._get_growth_tracker():
                return
            s.set_growth_interval(interval)
            self.line(f"i {i} {interval}", i)
        else:
            growth, backoff, interval = self.pick([(1.0, 0, 0), (0.5, 0, 0), (-2.0, 0, 0), (float("inf"), 0, 0), (0, 1.0, 0),
                                                   (0, -0.5, 0), (0, 3.0, 0), (0, 0, -2), (float("nan"), 0, 0)])
            self.refused(f"rule {i} {f64_bits(float(growth)):016x} {f64_bits(float(backoff)):016x} {interval}", i, RANGE,
                         "set_rule")

    def get(self, i):
        """Every getter; of a disabled scaler PyTorch has two."""
        s = self.scalers[i]
        if s.is_enabled():
            state = s.state_dict()
            assert state["scale"] == s.get_scale() or state["scale"] != state["scale"]
            assert state["_growth_tracker"] == s._get_growth_tracker()
            rule = (s.get_growth_factor(), s.get_backoff_factor(), s.get_growth_interval())
            assert rule == (state["growth_factor"], state["backoff_factor"], state["growth_interval"])
            self.line(f"q {i} 1 {f64_bits(rule[0]):016x} {f64_bits(rule[1]):016x} {rule[2]}", i)
        else:
            assert s.get_scale() == 1.0 and s.state_dict() == {}
            self.line(f"q {i} 0 0 0 0", i)

    def multiply(self, i):
        """scale(): a tensor, a list in a tuple; disabled it is the same object."""
        s, x = self.scalers[i], value(self.rng)
        t = torch.tensor([x])
        one, nested = s.scale(t), s.scale(([t], t))
        assert s.is_enabled() or one is t
        assert canonical32(one) == canonical32(nested[0][0]) == canonical32(nested[1])
        self.line(f"s {i} {f32_bits(x):08x}", i, OK, f" {canonical32(one):08x}")

    def save(self, i):
        slot = self.rng.below(3)
        state = self.scalers[i].state_dict()
        if self.dirty[i]:
            self.counts["differs_mid_iteration"] += 1
        self.saved[slot] = (state, self.dirty[i], self.checked[i])
        self.line(f"v {i} {slot}", i)

    def load(self, i):
        slot = self.rng.below(4)
        s = self.scalers[i]
        if slot not in self.saved:
            if s.is_enabled():
                self.refused(f"load {i} {slot}", i, NAME, "missing")
            return
        state, dirty, checked = self.saved[slot]
        result = self.attempt(s.load_state_dict, state)
        stages = self.dirty[i] or dirty
        if not s.is_enabled():
            self.release(i)
            self.checked[i] = checked
        self.line(f"l {i} {slot}", i, result)
        if result == OK and s.is_enabled() and stages:
            self.counts["differs_stages_kept"] += self.dirty[i]
            self.agree(i)

    def restart(self, i):
        """pickle: another process goes on with the scaler."""
        s = self.scalers[i]
        if s.is_enabled() and len(s._per_optimizer_states):
            try:
                pickle.dumps(s)
                raise SystemError("PyTorch pickles a scaler in the middle of an iteration")
            except AssertionError:
                self.counts["differs_mid_iteration"] += 1
            return
        checked = self.checked[i]
        self.release(i)
        self.checked[i] = checked
        self.scalers[i] = pickle.loads(pickle.dumps(s))
        self.scalers[i].scale(torch.zeros(()))
        self.line(f"p {i}", i)

    def poison(self, k):
        """Not finite between unscale_ and step: nobody looks again."""
        o = self.optimizers[k]
        if o.kind == "range" or not o.fresh or o.params[0].grad is None:
            return
        bad, at = 1 + self.rng.below(3), self.rng.below(len(o.params[0]))
        o.params[0].grad[at] = BAD[bad]
        self.line(f"x {k} {at} {bad}", 0)

    def new_weights(self, k):
        o, seed = self.optimizers[k], self.rng.below(1 << 30)
        if o.kind != "range":
            o.set_weights(Random(seed))
            self.line(f"w {k} {seed}", 0)

    def refuse_scale(self, i):
        bad = self.pick([float("inf"), float("nan"), 0.0, -1.0, 2.0 ** 127, 1e-40])
        if self.preset == "default" and self.scalers[i].is_enabled():
            self.refused(f"scale {i} {f32_bits(bad):08x}", i, SCALE, "bad_scale")

    # -- A program

    def iteration(self, i):
        self.make_gradients(i)
        for k in range(len(self.optimizers)):
            if self.rng.below(3) == 0:
                self.unscale(i, k, self.rng.below(3) == 0)
            if self.rng.below(12) == 0:
                self.poison(k)
            self.step(i, k, self.pick("tT"))
        self.update(i)

    def any_call(self, i):
        k, op = self.rng.below(len(self.optimizers)), self.rng.below(21)
        if op < 4: self.unscale(i, k, self.rng.below(3) == 0)
        elif op < 8: self.step(i, k, self.pick("tTa"))
        elif op < 10: self.update(i)
        elif op == 10: self.agree(i)
        elif op == 11: self.set_rule(i)
        elif op == 12: self.get(i)
        elif op == 13: self.multiply(i)
        elif op == 14: self.save(i)
        elif op in (15, 20): self.load(i)
        elif op == 16: self.restart(i)
        elif op == 17: (self.poison if self.rng.below(2) else self.renew)(k)
        elif op == 18 and self.rng.below(2): self.new_weights(k)
        elif op == 18: self.refuse_scale(i)
        else: self.make_gradients(i)

    def run(self, events):
        self.make_gradients(0)
        while self.events < events:
            i = self.rng.below(len(self.scalers))
            if self.rng.below(4) == 0:
                self.iteration(i)
            else:
                self.any_call(i)
        return self.events


def scaler_programs(out, counts, seed, calls):
    """As many calls of the scaler or of its optimizers' steps; what only changes arrays does not count."""
    rng, number = Random(seed), 0
    while counts["scaler_calls"] < calls:
        counts["scaler_events"] += ScalerProgram(out, counts, rng, number).run(40 + rng.below(120))
        number += 1
    counts["scaler_programs"] = number


# ---- Presets, and several scalers at once

# By the number of amp_scaler_preset; 60: fairseq with tolerance 0.25; 40: DeepSpeed without hysteresis.
PRESETS = [1, 2, 3, 4, 40, 5, 6, 60, 7, 8, 9]


def start(preset, window, scale):
    rule = rules.make(4 if preset == 40 else preset, window)
    if preset == 40:
        rule.h0 = rule.h = 1
    if scale:
        rule.s = scale
    return rule


def pattern_of(rule, pattern):
    for c in pattern:
        rule.step(c == "X")
    return rule.s


# The presets compared: an interval of 10, from 2^10; the exponent of the scale after each pattern, . clean, X overflow.  The
# first growth comes in one of the first three columns.  ENDS: after 400 growths (flax takes two updates for one).
COLUMNS = ["." * 9, "." * 10, "." * 11, "....X" * 6, "X." * 6, "XXXX", "XX...." * 3]
TABLE = {(1, 2, 9, 6, 40): [10, 11, 11, 4, 4, 6, 4], (8, 5): [10, 10, 11, 4, 4, 6, 4], (3, 4): [10, 11, 11, 5, 5, 7, 5],
         (60,): [10, 11, 11, 10, 4, 6, 6]}
ENDS = {1: 2.0 ** 127, 9: 2.0 ** 127, 8: rules.MAX, 2: 2.0 ** 24, 3: float("inf"), 4: float("inf"), 40: float("inf"),
        5: float("inf"), 6: float("inf"), 60: float("inf")}


def preset_table(out, counts):
    """Each cell, which PyTorch and the other rules must give themselves."""
    for row, exponents in TABLE.items():
        for preset in row:
            for pattern, exponent in zip(COLUMNS, exponents):
                got = pattern_of(start(preset, 10, 1024.0), pattern)
                assert got == 2.0 ** exponent, (preset, pattern, got)
    for preset, end in ENDS.items():
        got = pattern_of(start(preset, 1, 1024.0), "." * (800 if preset == 8 else 400))
        assert got == end, (preset, got)
    for preset in PRESETS:
        for pattern in COLUMNS + ["." * 400 + "." * 400 * (preset == 8)]:
            window = 1 if len(pattern) >= 400 else 10
            end = pattern_of(start(preset, window, 1024.0), pattern)
            end = f32_bits(end) if end < 2.0 ** 128 else 0x7F800000
            out.write(f"preset {preset} {window} {pattern} = {end:08x}\n")
            counts["preset_cells"] += 1


def preset_programs(out, counts, seed, programs):
    """Two to five scalers of any presets take turns; what each stands at after each of its updates."""
    rng = Random(seed)
    for number in range(programs):
        kinds = [(PRESETS[rng.below(len(PRESETS))], [0, 1, 2, 3, 10][rng.below(5)]) for _ in range(2 + rng.below(4))]
        scalers, rate = [start(p, w, 0) for p, w in kinds], [2, 3, 6, 30][rng.below(4)]
        out.write(f"together {number} {len(kinds)}" + "".join(f" {p} {w}" for p, w in kinds) + "\n")
        for _ in range(20 + rng.below(60)):
            i, bad = rng.below(len(kinds)), rng.below(rate) == 0
            scalers[i].step(bad)
            end = f32_bits(scalers[i].s) if scalers[i].s < 2.0 ** 128 else 0x7F800000
            out.write(f"o {i} {int(bad)} = {end:08x}\n")
            counts["preset_events"] += 1
    counts["preset_programs"] = programs


# ---- Autocast programs

NAMES = dict(autocast.NAMES)
REGION_DTYPES = [torch.float16, torch.bfloat16, torch.float32]
DEVICES = ["cuda", "cpu"]                       # amp.h's contexts 0 and 1


class Table:
    """What operators return: PyTorch's answers, in autocast.txt; those of fp32 regions are asked now."""

    def __init__(self):
        self.known, self.differs = {}, set()
        for line in open(os.path.join(common.GOLDEN, "autocast.txt")):
            device, op, inputs, region, result = line.split()[:5]
            if device == "cuda":
                self.known[op, inputs, region] = result
            elif line.endswith("differs\n"):
                self.differs.add((op, inputs, region))
        self.operators = sorted({key[0] for key in self.known})
        self.inputs = collections.defaultdict(list)
        for op, inputs, region in self.known:
            if region == "none":
                self.inputs[op].append(inputs)

    def result(self, device, op, inputs, region):
        """None: not to be asked."""
        if region == "fp32" and (op, inputs, region) not in self.known:
            count, function = autocast.OPERATORS[op]
            dtypes = [t for name in inputs.split(",")[:count] for t in autocast.FLOATS if NAMES[t] == name]
            self.known[op, inputs, region] = autocast.decide(function, dtypes, torch.float32)[1]
        result = self.known[op, inputs, region]
        if device == "cpu" and (op, inputs, region) in self.differs:
            return None
        if result == "error" and not (op == "user_banned" and region != "none"):
            return None
        return result


class Worker(threading.Thread):
    """A thread of its own state, that does one thing at a time for whoever asks."""

    def __init__(self):
        super().__init__(daemon=True)
        self.asked, self.done, self.regions = queue.SimpleQueue(), queue.SimpleQueue(), []
        self.start()

    def run(self):
        for function in iter(self.asked.get, None):
            self.done.put(function())

    def call(self, function):
        self.asked.put(function)
        return self.done.get()


def region(device, dtype, enabled, cache):
    """torch.autocast; without a GPU it would turn itself off on "cuda", though its state needs none."""
    r = torch.autocast(device, dtype=dtype, enabled=False, cache_enabled=cache)
    r._enabled = enabled
    return r


def state_of(device):
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()


class AutocastProgram:
    THREADS, SLOTS = 5, 4

    def __init__(self, out, counts, rng, table, number):
        self.out, self.counts, self.rng, self.table, self.events = out, counts, rng, table, 0
        self.contexts = 1 + (rng.below(3) == 0)
        self.depth = 32 if rng.below(20) == 0 else 10
        self.workers = [Worker()] + [None] * (self.THREADS - 1)
        self.slots = {}
        self.weights = [torch.full((1, 1), 1.0 + 2.0 ** -12, requires_grad=True) for _ in DEVICES]
        out.write(f"autocast {number} {self.contexts}\n")

    def line(self, t, text, result):
        self.out.write(f"{t} {text} = {result}\n")
        self.events += 1
        self.counts["autocast_" + text.split()[0]] += 1

    def spawn(self, t):
        k = self.rng.below(self.THREADS)
        if self.workers[k] is None:
            made = self.workers[t].call(Worker)             # a thread of that thread, wherever that is
            self.workers[k] = made
            for device in DEVICES[:self.contexts]:
                enabled, _, cache = made.call(lambda: state_of(device))
                assert not enabled and cache
                # a new thread has PyTorch's own default; amp.h's context has one for all
                made.call(lambda: torch.set_autocast_dtype(device, self.default[device]))
            self.line(t, f"f {k}", 0)

    def join(self, t):
        k = self.rng.below(self.THREADS)
        if k != t and k != 0 and self.workers[k] is not None and not self.workers[k].regions:
            self.workers[k].asked.put(None)
            self.workers[k].join()
            self.workers[k] = None
            self.line(t, f"j {k}", 0)

    def begin(self, t):
        c, kind = self.rng.below(self.contexts), self.rng.below(5)
        dtype = None if kind == 0 else REGION_DTYPES[self.rng.below(3 if c == 0 else 2)]
        enabled, cache = self.rng.below(4) > 0, False if self.rng.below(6) == 0 and self.contexts == 1 else None
        w = self.workers[t]
        if len(w.regions) >= self.depth:
            return

        def enter():
            r = region(DEVICES[c], dtype, enabled, cache)
            r.__enter__()
            return r
        w.regions.append((c, w.call(enter)))
        self.line(t, f"b {c} {NAMES[dtype] if dtype else 'default'} {int(not enabled)} {int(cache is False)}", 0)

    def end(self, t):
        w, c = self.workers[t], self.rng.below(self.contexts)
        if w.regions and w.regions[-1][0] == c:
            r = w.regions.pop()[1]
            w.call(lambda: r.__exit__(None, None, None))
            self.line(t, f"e {c}", 0)
        else:
            self.counts["differs_end_alone"] += 1
            self.line(t, f"e {c}", STATE)

    def active(self, t):
        c, w = self.rng.below(self.contexts), self.workers[t]
        enabled, dtype, cache = w.call(lambda: state_of(DEVICES[c]))
        inside = any(r[0] == c for r in w.regions)
        assert inside or not enabled
        self.line(t, f"a {c}", f"{int(enabled)} {NAMES[dtype] if inside else '-'} {int(cache or not inside)}")

    def now(self, t, c):
        enabled, dtype, _ = self.workers[t].call(lambda: state_of(DEVICES[c]))
        return NAMES[dtype] if enabled else "none"

    def decide(self, t):
        c, op = self.rng.below(self.contexts), self.table.operators[self.rng.below(len(self.table.operators))]
        inputs = self.table.inputs[op][self.rng.below(len(self.table.inputs[op]))]
        result = self.table.result(DEVICES[c], op, inputs, self.now(t, c))
        if result is not None:
            self.line(t, f"d {c} {op} {inputs}", result)

    def product(self, t, c, x, w):
        """linear of one number; PyTorch's cache gives an old copy of a weight that changed, so it is emptied."""
        dtype = self.now(t, c)

        def run():
            torch.clear_autocast_cache()
            if DEVICES[c] == "cpu":
                return torch.nn.functional.linear(x, w)
            to = {name: d for d, name in NAMES.items()}.get(dtype, torch.float32)
            with torch.autocast("cpu", enabled=False):
                return torch.nn.functional.linear(x.to(to), w.to(to))
        return self.workers[t].call(run)

    def forward(self, t):
        """A weight of 1 and an x of more bits than 16-bit dtypes hold, or 1 and the context's weight, whose casts amp.h
        keeps from region to region."""
        c, slot, shared = self.rng.below(self.contexts), self.rng.below(self.SLOTS), self.rng.below(2)
        number = 1.0 if shared else 1.0 + self.rng.below(1 << 20) * 2.0 ** -20
        x = torch.tensor([[number]], requires_grad=True)
        w = self.weights[c] if shared else torch.ones(1, 1, requires_grad=True)
        y = self.product(t, c, x, w)
        self.slots[slot] = (c, x, w, y)
        self.line(t, f"l {c} {slot} {f32_bits(number):08x} {shared}", f"{canonical32(y):08x} {NAMES[y.dtype]}")

    def change(self, t):
        """Another weight: a step's, or by hand and amp_param_changed.  Backwards of the old one are over."""
        c, number = self.rng.below(self.contexts), 1.0 + self.rng.below(1 << 20) * 2.0 ** -20
        self.slots = {k: v for k, v in self.slots.items() if v[2] is not self.weights[c]}
        with torch.no_grad():
            self.weights[c].fill_(number)
        self.line(t, f"w {c} {f32_bits(number):08x}", 0)

    def backward(self, t):
        """In the dtype of its forward; in amp.h wherever it runs, in whatever thread."""
        slot = self.rng.below(self.SLOTS)
        if slot in self.slots:
            c, x, w, y = self.slots.pop(slot)
            self.counts["differs_backward_inside"] += self.now(t, 1) != "none"
            w.grad = None
            with torch.autocast("cpu", enabled=False):
                y.sum().backward()
            self.line(t, f"g {c} {slot}", f"{canonical32(w.grad):08x} {canonical32(x.grad):08x}")

    def clear_cache(self, t):
        torch.clear_autocast_cache()
        self.line(t, f"c {self.rng.below(self.contexts)}", 0)

    def set_default(self, t):
        """torch.set_autocast_dtype, outside of regions, in every thread."""
        c = self.rng.below(self.contexts)
        if any(r[0] == c for w in self.workers if w for r in w.regions):
            return
        dtype = REGION_DTYPES[self.rng.below(2)]
        self.default[DEVICES[c]] = dtype
        for w in self.workers:
            if w:
                w.call(lambda: torch.set_autocast_dtype(DEVICES[c], dtype))
        self.line(t, f"s {c} {NAMES[dtype]}", 0)

    def run(self, events):
        self.default = {"cuda": torch.float16, "cpu": torch.bfloat16}
        for device, dtype in self.default.items():
            assert self.workers[0].call(lambda: torch.get_autocast_dtype(device)) == dtype
        calls = [self.begin] * 6 + [self.end] * 5 + [self.decide] * 6 + [self.active] * 3 + [self.forward] * 2
        calls += [self.forward, self.backward, self.backward, self.change]
        calls += [self.spawn, self.join, self.set_default] + [self.clear_cache] * (self.rng.below(3) == 0)
        while self.events < events:
            alive = [t for t, w in enumerate(self.workers) if w]
            calls[self.rng.below(len(calls))](alive[self.rng.below(len(alive))])
        self.close()
        return self.events

    def close(self):
        for t, w in enumerate(self.workers):
            while w and w.regions:
                c, r = w.regions.pop()
                w.call(lambda: r.__exit__(None, None, None))
                self.line(t, f"e {c}", 0)
            if w:
                w.asked.put(None)
                w.join()


def autocast_programs(out, counts, seed, programs):
    rng, table = Random(seed), Table()
    for number in range(programs):
        counts["autocast_events"] += AutocastProgram(out, counts, rng, table, number).run(20 + rng.below(60))
    counts["autocast_programs"] = programs


# ---- All of it

def corpus(seed, scaler_calls, autocast_count, together):
    out, counts = io.StringIO(), collections.Counter()
    out.write(f"fuzz_logic 1 seed {seed}\n")
    preset_table(out, counts)
    preset_programs(out, counts, seed + 3, together)
    scaler_programs(out, counts, seed + 1, scaler_calls)
    autocast_programs(out, counts, seed + 2, autocast_count)
    return out.getvalue(), counts


def argument(name):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else None


def main():
    warnings.simplefilter("ignore")
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)   # it logs what autocast.decide catches
    torch.set_num_threads(1)
    if argument("--out") is None:
        common.write_text("fuzz_logic.txt", corpus(2026, 2200, 60, 12)[0])
        return
    text, counts = corpus(1000 * int(argument("--seed") or 1), 110000, 4000, 2000)
    with open(argument("--out"), "w") as f:
        f.write(text)
    for name in sorted(counts):
        print(f"counted {name} {counts[name]}")
    for name, difference in DIFFERENCES.items():
        print(f"listed {name}: {difference}")
    for case in NOT_MET:
        print(f"listed not in programs: {case}")


if __name__ == "__main__":
    main()
