"""Arrays of numbers, and structs of them, from a MATLAB file of level 5: a sequence of elements.

SciPy reads such files too, but one that is damaged can crash the interpreter.
"""

import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from fedda.errors import InputError

# Kinds of elements in a MATLAB file, and classes of matrices.
NUMBERS = {
    **{1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4"},
    **{7: "f4", 9: "f8", 12: "i8", 13: "u8"},
}
MATRIX, COMPRESSED = 14, 15
STRUCT, NUMERIC = 2, range(6, 16)
Matrix = np.ndarray | dict[str, Any] | None


def variable(file: Path, wanted: str, most_bytes: int) -> Matrix:
    """A variable in a file, None if it is not there. It may unpack to so many bytes."""
    data = memoryview(file.read_bytes())
    order = {b"IM": "<", b"MI": ">"}.get(bytes(data[126:128]))
    if order is None or struct.unpack(f"{order}H", data[124:126]) != (0x0100,):
        raise InputError(f"{file} is no MATLAB file of level 5 (saved as v6 or v7).")
    try:
        rest = data[128:]
        while rest:
            kind, content, rest = _element(order, rest)
            if kind == COMPRESSED:
                kind, content, _ = _element(order, _inflated(content, most_bytes))
            if kind == MATRIX:
                name, value = _matrix(order, content)
                if name == wanted:
                    return value
    except (ValueError, OverflowError, struct.error, zlib.error) as error:
        raise InputError(f"{file} is damaged or cut short ({error}). Unpack it anew.") from None
    return None


def _inflated(data: memoryview, most_bytes: int) -> memoryview:
    stream = zlib.decompressobj()
    content = stream.decompress(data, most_bytes)
    if not stream.eof:
        raise ValueError("compressed data do not end")
    return memoryview(content)


def _element(order: str, data: memoryview) -> tuple[int, memoryview, memoryview]:
    """The first element: its kind and content, and what comes after it."""
    (kind,) = struct.unpack_from(f"{order}I", data)
    if kind >> 16:  # at most four bytes, with the length beside the kind
        kind, size, start, end = kind & 0xFFFF, kind >> 16, 4, 8
    else:
        (size,) = struct.unpack_from(f"{order}I", data, 4)
        start = 8
        end = start + size + (-size % 8 if kind != COMPRESSED else 0)
    if start + size > min(end, len(data)):
        raise ValueError("an element ends too soon")
    return kind, data[start : start + size], data[end:]


def _matrix(order: str, data: memoryview, depth: int = 0) -> tuple[str, Matrix]:
    """A name and an array of numbers, a struct of such, or None for anything else."""
    if not data:
        return "", None
    _, flags, data = _element(order, data)
    kind, content, data = _element(order, data)
    shape = _lengths(order, kind, content)
    _, name, data = _element(order, data)
    what = struct.unpack_from(f"{order}I", flags)[0] & 0xFF
    value: Matrix = None
    if what == STRUCT and math.prod(shape) == 1 and depth < 2:
        kind, content, data = _element(order, data)
        (width,) = _lengths(order, kind, content)
        _, names, data = _element(order, data)
        value = {}
        for start in range(0, len(names), max(width, 1)):
            _, content, data = _element(order, data)
            field = bytes(names[start : start + width]).rstrip(b"\0").decode("ascii")
            value[field] = _matrix(order, content, depth + 1)[1]
    elif what in NUMERIC:
        kind, content, _ = _element(order, data)
        value = _values(order, kind, content).reshape(shape, order="F")
    return bytes(name).decode("ascii"), value


def _lengths(order: str, kind: int, content: memoryview) -> list[int]:
    lengths = _values(order, kind, content)
    if lengths.dtype.kind not in "iu" or (lengths < 0).any():
        raise ValueError(f"{lengths[:3].tolist()} stands where lengths belong")
    found: list[int] = lengths.tolist()
    return found


def _values(order: str, kind: int, content: memoryview) -> np.ndarray:
    if kind not in NUMBERS:
        raise ValueError(f"{kind} stands where a kind of numbers belongs")
    return np.frombuffer(content, order + NUMBERS[kind])
