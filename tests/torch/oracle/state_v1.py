"""Makes tests/torch/golden/state_v1.blob, a state blob of format version 1, from the format's description alone.

    python tests/torch/oracle/state_v1.py
"""
import struct
import numpy as np

DTYPES = {"f4": 1, "f8": 2, "f2": 3, "bf16": 4, "u1": 8, "u2": 9, "i4": 10, "i8": 11}


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


assert crc32c(b"123456789") == 0xE3069283       # the check value of the CRC catalogue


def blob(records):
    directory, payloads = b"", b""
    for key, kind, values in records:
        payload = np.array(values, dtype="<u2" if kind == "bf16" else "<" + kind).tobytes()
        directory += struct.pack("<64sIIQ", key.encode(), DTYPES[kind], crc32c(payload), len(values))
        payloads += payload
    total = 40 + len(directory) + len(payloads)
    header = struct.pack("<8sIIQQI", b"AMPSTATE", 1, 100, total, len(records), crc32c(directory))
    return header + struct.pack("<I", crc32c(header)) + directory + payloads


RECORDS = [
    ("scaler.scale", "f4", [65536.0, -0.0, 1e-45]),
    ("f64", "f8", [1 / 3, -1e300]),
    ("f16", "f2", [0.5, 65504.0, -2.0]),
    ("bf16", "bf16", [0x3F80, 0x7F80, 0xFFC1]),
    ("u8", "u1", list(range(256))),
    ("u16", "u2", [0, 1, 65535]),
    ("i32", "i4", [-(2**31), 2**31 - 1, -1]),
    ("i64", "i8", [-(2**63), 2**63 - 1, 0x0102030405060708]),
    ("empty", "f4", []),
    ("k" * 63, "u1", [7]),
]

if __name__ == "__main__":
    with open("tests/torch/golden/state_v1.blob", "wb") as file:
        file.write(blob(RECORDS))
