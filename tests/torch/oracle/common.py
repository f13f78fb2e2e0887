"""Has what the oracle programs share: random numbers that C reproduces, golden files, and the error measure.

Run any oracle from the project root, for example `python tests/torch/oracle/gpt2.py`.  With --check, nothing is written,
and the exit status says whether the golden file was reproduced within its bounds.
"""
import os
import struct
import sys

import numpy as np

GOLDEN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "golden")
SEEDS = 64       # of the 16-bit statistics
WHOLE = 8        # of them stored whole


# ---- Random numbers: Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011: Parallel random numbers, as easy as 1, 2, 3)

def philox4x32(counter, key, rounds=10):
    """counter [n, 4] and key (2 words, or arrays of n) as uint32; returns [n, 4] uint32."""
    c = [counter[:, i].astype(np.uint64) for i in range(4)]
    k0, k1 = np.uint64(key[0]), np.uint64(key[1])
    low = np.uint64(0xFFFFFFFF)
    for _ in range(rounds):
        p0 = np.uint64(0xD2511F53) * c[0]
        p1 = np.uint64(0xCD9E8D57) * c[2]
        c = [(p1 >> np.uint64(32)) ^ c[1] ^ k0, p1 & low, (p0 >> np.uint64(32)) ^ c[3] ^ k1, p0 & low]
        k0 = (k0 + np.uint64(0x9E3779B9)) & low
        k1 = (k1 + np.uint64(0xBB67AE85)) & low
    return np.stack(c, axis=1).astype(np.uint32)


def _known_answers():
    """Test vectors published with the Random123 library."""
    ones = 0xFFFFFFFF
    for c, k, want in [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ones,) * 4, (ones, ones), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ]:
        got = philox4x32(np.array([c], dtype=np.uint32), k)[0]
        assert tuple(int(x) for x in got) == want


_known_answers()


def words(seed, stream, n):
    """n words of 32 bits: word j of block b is element 4 b + j; key (seed, 0), counter (b, 0, stream, 0)."""
    blocks = (n + 3) // 4
    counter = np.zeros((blocks, 4), dtype=np.uint32)
    counter[:, 0] = np.arange(blocks, dtype=np.uint32)
    counter[:, 2] = stream
    return philox4x32(counter, (seed, 0)).reshape(-1)[:n]


def uniform(seed, stream, shape, scale=1.0, shift=0.0, source=words):
    """fp32 numbers shift + scale u, u a multiple of 2^-23 in [-1, 1): one rounding per operation, as in golden.h."""
    n = int(np.prod(shape))
    u = ((source(seed, stream, n) >> np.uint32(8)).astype(np.float32) - np.float32(8388608)) * np.float32(2.0 ** -23)
    return (np.float32(shift) + np.float32(scale) * u).astype(np.float32).reshape(shape)


def integers(seed, stream, shape, below, source=words):
    """Integers 0..below-1: high half of word * below."""
    n = int(np.prod(shape))
    high = (source(seed, stream, n).astype(np.uint64) * np.uint64(below)) >> np.uint64(32)
    return high.astype(np.int32).reshape(shape)


# ---- Golden files: "AMPTGOLD", record count u32, then records {name length u32, name, type u32, count u64, values},
#      little-endian.  Types: 1 fp32, 2 fp64, 3 int32.

_TYPES = {np.dtype("<f4"): 1, np.dtype("<f8"): 2, np.dtype("<i4"): 3}
_NUMPY = {1: "<f4", 2: "<f8", 3: "<i4"}


def encode(records):
    out = [b"AMPTGOLD", struct.pack("<I", len(records))]
    for name, values in records.items():
        values = np.ascontiguousarray(values)
        raw = name.encode()
        kind = _TYPES[values.dtype.newbyteorder("<")]
        out += [struct.pack("<I", len(raw)), raw, struct.pack("<IQ", kind, values.size), values.tobytes()]
    return b"".join(out)


def decode(data):
    assert data[:8] == b"AMPTGOLD"
    (count,), at, records = struct.unpack_from("<I", data, 8), 12, {}
    for _ in range(count):
        (length,) = struct.unpack_from("<I", data, at)
        name = data[at + 4:at + 4 + length].decode()
        kind, n = struct.unpack_from("<IQ", data, at + 4 + length)
        at += 4 + length + 12
        records[name] = np.frombuffer(data, dtype=_NUMPY[kind], count=n, offset=at)
        at += records[name].nbytes
    return records


def same_within(old, new, bound):
    """Why two sets of records differ by more than bound(name), a relative norm; None if they do not."""
    if list(old) != list(new):
        return "other records"
    for name in new:
        a, b = old[name].astype(np.float64).ravel(), np.asarray(new[name]).astype(np.float64).ravel()
        if a.size != b.size:
            return f"{name}: {b.size} values instead of {a.size}"
        off = np.linalg.norm(a - b) / max(np.linalg.norm(a), 1e-300)
        if off > bound(name):
            return f"{name}: relative deviation {off:.2e}, bound {bound(name):.0e}"
    return None


def write_golden(filename, records, bound):
    """Leaves the committed file alone when the new records agree with it within the bounds; writes it otherwise."""
    path = os.path.normpath(os.path.join(GOLDEN, filename))
    data = encode(records)
    old = open(path, "rb").read() if os.path.exists(path) else None
    if old == data:
        verdict, why = "reproduced bit for bit", None
    elif old is not None and (why := same_within(decode(old), records, bound)) is None:
        verdict = "reproduced within its bounds"
    else:
        verdict, why = ("differs", why) if old is not None else ("new", "no such file yet")
    finish(path, data, verdict, why)


def write_text(filename, text):
    """The same for a table in text, which is reproduced exactly or not at all."""
    path = os.path.normpath(os.path.join(GOLDEN, filename))
    old = open(path).read() if os.path.exists(path) else None
    if old == text:
        finish(path, text.encode(), "reproduced exactly", None)
    else:
        finish(path, text.encode(), "differs" if old is not None else "new", "another table")


def finish(path, data, verdict, why):
    print(f"{os.path.basename(path)}: {verdict}" + (f" ({why})" if why else "") + f", {len(data)} bytes")
    if why and "--check" in sys.argv:
        sys.exit(1)
    if why:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as f:
            f.write(data)


# ---- The error measure

def relative_errors(got, exact, layer_of):
    """|got - exact| / max(|exact|, floor) per tensor, by name.  The floor is the gradient norm of the tensor's layer,
    spread evenly over the layer's elements: sqrt(elements of the tensor / elements of the layer) |layer|.  It keeps
    tensors whose exact gradient is zero, or cancels almost entirely, measurable."""
    square, count = {}, {}
    for name, e in exact.items():
        layer = layer_of(name)
        square[layer] = square.get(layer, 0.0) + float(np.sum(e.astype(np.float64) ** 2))
        count[layer] = count.get(layer, 0) + e.size
    out = {}
    for name, e in exact.items():
        layer = layer_of(name)
        floor = np.sqrt(e.size / count[layer] * square[layer])
        difference = np.linalg.norm((got[name].astype(np.float64) - e.astype(np.float64)).ravel())
        out[name] = difference / max(np.linalg.norm(e.astype(np.float64).ravel()), floor)
    return out


def rms(errors):
    """Root mean square per tensor of a list of dicts."""
    return {name: float(np.sqrt(np.mean([e[name] ** 2 for e in errors]))) for name in errors[0]}


# ---- Running a model as the exact result and as PyTorch would

LOSS_SCALE = 1024.0     # of fp16, for PyTorch and for amp.h alike; a power of two, so it adds no error of its own


def run_exact(build, forward):
    """Loss, logits and gradients in fp64.  build() makes the fp32 module, forward(module) gives (logits, loss)."""
    module = build().double()
    logits, loss = forward(module)
    loss.backward()
    return float(loss.detach()), logits.detach().numpy(), gradients(module)


def run_torch(build, forward, dtype):
    """The same as PyTorch trains it: fp32, or fp32 weights under CPU autocast with a 16-bit dtype."""
    import torch
    module = build()
    scale = LOSS_SCALE if dtype == torch.float16 else 1.0
    low = dtype != torch.float32
    with torch.autocast("cpu", dtype=dtype if low else torch.bfloat16, enabled=low):
        logits, loss = forward(module)
    (loss * scale).backward()
    return float(loss.detach()), logits.detach().float().numpy(), {k: g / scale for k, g in gradients(module).items()}


def gradients(module):
    return {name: p.grad.detach().numpy() for name, p in module.named_parameters()}


def model_records(case_name, runs, layer_of, whole):
    """Records of one case.  runs: (build, forward) of each seed.  whole: number of seeds whose exact logits and
    gradients are stored.  The RMS over all seeds of PyTorch's errors in fp32, bf16 and fp16 is stored per tensor
    ("logits" is a tensor of its own layer)."""
    import torch
    records, errors = {}, {"fp32": [], "bf16": [], "fp16": []}
    kinds = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    for seed, (build, forward) in enumerate(runs):
        loss, logits, grads = run_exact(build, forward)
        exact = {"logits": logits, **grads}
        records[f"{case_name}/{seed}/loss"] = np.array([loss])
        if seed < whole:
            for name, g in exact.items():
                records[f"{case_name}/{seed}/{name}"] = g.astype(np.float32)
        for kind, dtype in kinds.items():
            t_loss, t_logits, t_grads = run_torch(build, forward, dtype)
            e = relative_errors({"logits": t_logits, **t_grads}, exact, layer_of)
            e["loss"] = abs(t_loss - loss) / abs(loss)
            errors[kind].append(e)
    for kind in kinds:
        r = rms(errors[kind])
        for name, value in r.items():
            records[f"{case_name}/torch/{kind}/{name}"] = np.array([value])
        print(f"  {case_name} {kind}: PyTorch's RMS error, largest {max(r.values()):.2e} ({max(r, key=r.get)}), "
              f"logits {r['logits']:.2e}")
    return records


def model_bound(name):
    """Exact results are rounded fp64: another machine may round the last bit the other way.  PyTorch's own errors
    depend on its kernels for this CPU: they are compared as magnitudes."""
    return 0.5 if "/torch/" in name else 1e-6
