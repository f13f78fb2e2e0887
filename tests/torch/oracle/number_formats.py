#!/usr/bin/env python3
"""Makes the golden data of tests/unit/t_numbers.c, in about 10 minutes on one core.

    python tests/torch/oracle/number_formats.py

tests/torch/golden/numbers.txt has the CRC-32 of the results for blocks of inputs, one "format direction block crc" per
line.
  narrow: the 2^24 fp32 patterns whose upper byte is `block`, to each format; by PyTorch and by ml_dtypes
          (fp16: numpy), which must agree, except that PyTorch from 2.12 on saturates E4M3 where ml_dtypes gives NaN;
          TF32 by fp64 arithmetic, ties away from zero.
  widen:  256 patterns from 256 * block on (fp8: all), to fp32; by ml_dtypes (fp16: numpy).
  Before the CRC every NaN is replaced by the one NaN of the table FORMATS.
tests/torch/golden/numbers_f64.txt has fp64 patterns and their fp16, bf16, E4M3, E5M2, fp32 and TF32 patterns.  They are
rounded once with rational arithmetic over the list of all values of a format.  Many are at or beside a midpoint.
"""
import random
import struct
import zlib
from fractions import Fraction

import ml_dtypes
import numpy as np
import torch

from common import write_text

torch.set_num_threads(1)

# name: (bytes, magnitude mask, largest magnitude that is no NaN, the NaN, torch dtype, other dtype)
FORMATS = {
    "fp16": (np.uint16, 0x7FFF, 0x7C00, 0x7E00, torch.float16, np.float16),
    "bf16": (np.uint16, 0x7FFF, 0x7F80, 0x7FC0, torch.bfloat16, ml_dtypes.bfloat16),
    "fp8_e4m3": (np.uint8, 0x7F, 0x7E, 0x7F, torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": (np.uint8, 0x7F, 0x7C, 0x7E, torch.float8_e5m2, ml_dtypes.float8_e5m2),
}


def canonical(bits, mask, largest, nan):
    bits = bits.copy()
    bits[(bits & bits.dtype.type(mask)) > largest] = nan
    return bits


def tf32(x):
    """fp32 array to TF32: 11 significant bits, not below 2^-136, ties away from zero."""
    bits = x.view(np.uint32)
    special = (bits & np.uint32(0x7F800000)) == 0x7F800000
    exact = np.where(special, np.float32(0), x).astype(np.float64)
    _, exponent = np.frexp(exact)
    quantum = np.maximum(exponent, -125) - 11
    rounded = np.ldexp(np.floor(np.ldexp(np.abs(exact), -quantum) + 0.5), quantum)
    with np.errstate(over="ignore"):
        out = np.copysign(rounded, exact).astype(np.float32)
    return np.where(special, x, out).view(np.uint32)


def narrow_block(block):
    x = np.arange(block << 24, (block + 1) << 24, dtype=np.uint32).view(np.float32)
    for name, (kind, mask, largest, nan, torch_dtype, other) in FORMATS.items():
        integers = torch.int16 if kind is np.uint16 else torch.int8
        a = torch.from_numpy(x.copy()).to(torch_dtype).view(integers).numpy().view(kind)
        with np.errstate(all="ignore"):
            b = x.astype(other).view(kind)
        a, b = canonical(a, mask, largest, nan), canonical(b, mask, largest, nan)
        saturated = np.where((b == nan) & ~np.isnan(x), largest | np.signbit(x) << 7, b) if name == "fp8_e4m3" else b
        assert np.array_equal(a, b) or np.array_equal(a, saturated), (name, block)
        yield name, zlib.crc32(b.tobytes())
    yield "tf32", zlib.crc32(canonical(tf32(x), 0x7FFFFFFF, 0x7F800000, 0x7FC00000).tobytes())


def widen_lines():
    for name, (kind, _, _, _, _, other) in FORMATS.items():
        codes = np.arange(256 if kind is np.uint8 else 65536, dtype=np.uint32).astype(kind)
        wide = canonical(codes.view(other).astype(np.float32).view(np.uint32), 0x7FFFFFFF, 0x7F800000, 0x7FC00000)
        for block in range(len(codes) // 256):
            yield f"{name} widen {block} {zlib.crc32(wide[256 * block:256 * block + 256].tobytes()):08x}"


class Format:
    """A format as the list of its non-negative finite values, in the order of their patterns."""

    def __init__(self, mantissa, bias, largest):
        self.mantissa, self.bias, self.largest = mantissa, bias, largest

    def value(self, pattern):
        exponent, fraction = pattern >> self.mantissa, pattern & ((1 << self.mantissa) - 1)
        if exponent:
            fraction += 1 << self.mantissa
        return Fraction(fraction) * Fraction(2) ** (max(exponent, 1) - self.bias - self.mantissa)

    def round(self, x, away=False):
        """The pattern nearest to x >= 0; largest + 1 beyond the last midpoint."""
        low, high = 0, self.largest + 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.value(middle) <= x else (low, middle)
        if low > self.largest:
            return self.largest + 1
        below, above = x - self.value(low), self.value(low + 1) - x
        if below != above:
            return low if below < above else low + 1
        return low + 1 if away or low & 1 else low


F64_FORMATS = {"fp16": Format(10, 15, 0x7BFF), "bf16": Format(7, 127, 0x7F7F), "fp8_e4m3": Format(3, 7, 0x7E),
               "fp8_e5m2": Format(2, 15, 0x7B), "fp32": Format(23, 127, 0x7F7FFFFF), "tf32": Format(10, 127, 0x3FBFF)}
SIGN = {"fp16": 15, "bf16": 15, "fp8_e4m3": 7, "fp8_e5m2": 7, "fp32": 31, "tf32": 31}


def f64_inputs():
    rng = random.Random(20240601)
    for fmt in F64_FORMATS.values():
        patterns = [0, 1, 2, 3, (1 << fmt.mantissa) - 1, 1 << fmt.mantissa, fmt.largest - 1, fmt.largest]
        patterns += [rng.randrange(fmt.largest + 1) for _ in range(40)]
        for p in patterns:
            middle = float((fmt.value(p) + fmt.value(p + 1)) / 2)
            bits = struct.unpack("<Q", struct.pack("<d", middle))[0]
            # beside the midpoint by so little that fp32 would land on it
            yield from (bits, bits - 1, bits + 1, bits - (1 << 20), bits + (1 << 20))
    yield from (0, 1, (1 << 52) - 1, 1 << 52, 0x7FEFFFFFFFFFFFFF)
    for _ in range(300):
        yield rng.getrandbits(63) % 0x7FF0000000000000


def f64_lines():
    for number, bits in enumerate(f64_inputs()):
        x = Fraction(struct.unpack("<d", struct.pack("<Q", bits))[0])
        sign = number % 3 == 0
        line = [f"{bits | sign << 63:016x}"]
        for name, fmt in F64_FORMATS.items():
            pattern = fmt.round(x, away=name == "tf32") << (13 if name == "tf32" else 0)
            line.append(f"{pattern | sign << SIGN[name]:x}")
            if name in ("fp16", "fp32"):
                with np.errstate(all="ignore"):
                    other = np.float64(float(x)).astype(np.float16 if name == "fp16" else np.float32)
                assert int(other.view(np.uint16 if name == "fp16" else np.uint32)) == pattern, (name, hex(bits))
        yield " ".join(line)


def main():
    write_text("numbers_f64.txt", "".join(line + "\n" for line in f64_lines()))
    lines = list(widen_lines())
    for block in range(256):
        lines += [f"{name} narrow {block} {crc:08x}" for name, crc in narrow_block(block)]
    write_text("numbers.txt", "".join(line + "\n" for line in lines))


if __name__ == "__main__":
    main()
