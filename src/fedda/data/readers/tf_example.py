"""Decodes tf.train.Example, the record of TensorFlow Federated's SQLite files, from its bytes.

The messages nest as Example{1: Features}, Features{1: entries of a map}, entry{1: name, 2: Feature}
and Feature{1: bytes, 2: floats or 3: int64s}, each list{1: values}. Numbers may be packed into one
field or stand in a field each. Anything cut off or malformed is refused, never guessed.
"""

from collections.abc import Collection, Iterator

import numpy as np

from fedda.errors import InputError

Value = np.ndarray | list[bytes]  # float32 [n], int64 [n] or n byte strings

# Wire types: what follows a field's tag.
_VARINT, _EIGHT_BYTES, _SIZED, _FOUR_BYTES = 0, 1, 2, 5
_BYTES, _FLOATS, _INTS = 1, 2, 3  # the kinds of a Feature
_MOST_VARINT_BYTES = 10


def decode(data: bytes, names: Collection[str]) -> dict[str, Value]:
    """The features called `names`. Others are skipped, as are fields that the format lacks."""
    found: dict[str, Value] = {}
    for features in _messages(data, 0, len(data), number=1):
        for entry in _messages(data, *features, number=1):
            name, value = _entry(data, *entry)
            if name in names:
                found[name] = _feature(data, *value)  # the last of a name counts
    missing = sorted(set(names) - set(found))
    if missing:
        raise InputError(
            f"a tf.train.Example of {len(data)} bytes has no feature {missing[0]!r} "
            f"(it needs {', '.join(sorted(names))})"
        )
    return found


def _entry(data: bytes, begin: int, end: int) -> tuple[str, tuple[int, int]]:
    """The name of a feature, and where its value lies."""
    name, value = b"", None
    for number, wire, start, stop in _fields(data, begin, end):
        if number in (1, 2) and wire != _SIZED:
            raise _malformed(f"field {number} of a feature has wire type {wire}", start)
        if number == 1:
            name = data[start:stop]
        elif number == 2:
            if value is not None:
                raise _malformed(f"the feature {name!r} has two values", start)
            value = (start, stop)
    try:
        return name.decode(), value or (end, end)
    except UnicodeDecodeError:
        raise _malformed(f"the name {name!r} is not UTF-8", begin) from None


def _feature(data: bytes, begin: int, end: int) -> Value:
    """The values of one feature: the last kind that is given."""
    kind, chunks = _BYTES, list[bytes]()
    for number, wire, start, stop in _fields(data, begin, end):
        if number not in (_BYTES, _FLOATS, _INTS):
            continue
        if wire != _SIZED:
            raise _malformed(f"a list of values has wire type {wire}", start)
        chunks = chunks if number == kind else []
        kind = number
        chunks += _chunks(data, start, stop, kind)
    if kind == _BYTES:
        return chunks
    raw = chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if kind == _FLOATS:
        return np.frombuffer(raw, "<f4")
    return _int64s(raw)


def _chunks(data: bytes, begin: int, end: int, kind: int) -> Iterator[bytes]:
    """A list's values as they lie: each byte string, or whole numbers, one or many together."""
    single = {_BYTES: _SIZED, _FLOATS: _FOUR_BYTES, _INTS: _VARINT}[kind]
    for number, wire, start, stop in _fields(data, begin, end):
        if number != 1:
            continue
        if wire not in (single, _SIZED):
            raise _malformed(f"a value of kind {kind} has wire type {wire}", start)
        chunk = data[start:stop]
        if kind == _FLOATS and len(chunk) % 4:
            raise _malformed(f"packed floats take {len(chunk)} bytes, no multiple of 4", start)
        if kind == _INTS and chunk and chunk[-1] >= 0x80:
            raise _malformed("packed integers end in the middle of one", start)
        yield chunk


def _int64s(raw: bytes) -> np.ndarray:
    """Varints: seven bits a byte, the lowest first; the top bit says that another byte follows."""
    octets = np.frombuffer(raw, np.uint8)
    last = np.flatnonzero(octets < 0x80)
    if len(last) == len(octets):
        return octets.astype(np.int64)
    first = np.append(0, last[:-1] + 1)
    size = last - first + 1
    place = np.arange(len(octets)) - np.repeat(first, size)
    bits = (octets & 0x7F).astype(np.uint64)
    if place.max() >= _MOST_VARINT_BYTES or (bits[place == _MOST_VARINT_BYTES - 1] > 1).any():
        raise _malformed("an integer has more than 64 bits", 0)
    parts = bits << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(parts, first).view(np.int64)


def _messages(data: bytes, begin: int, end: int, number: int) -> Iterator[tuple[int, int]]:
    """Where the messages lie that are field `number` of the message data[begin:end]."""
    for found, wire, start, stop in _fields(data, begin, end):
        if found == number:
            if wire != _SIZED:
                raise _malformed(f"a message has wire type {wire}", start)
            yield start, stop


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int, int]]:
    """The fields of the message data[at:end]: number, wire type, where the content begins, ends."""
    while at < end:
        tag, at = _varint(data, at, end)
        number, wire = tag >> 3, tag & 7
        if wire == _SIZED:
            size, at = _varint(data, at, end)
            stop = at + size
        elif wire == _VARINT:
            _, stop = _varint(data, at, end)
        elif wire == _FOUR_BYTES:
            stop = at + 4
        elif wire == _EIGHT_BYTES:
            stop = at + 8
        else:
            raise _malformed(f"there is no wire type {wire}", at)
        if stop > end:
            raise _malformed(f"a field ends {stop - end} bytes after its message", at)
        if not number:
            raise _malformed("a field has the number 0", at)
        yield number, wire, at, stop
        at = stop


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """One varint from data[at:end], and where it ends."""
    if at < end and data[at] < 0x80:  # most are one byte, and this is where the time goes
        return data[at], at + 1
    value = 0
    for place, octet in enumerate(data[at : min(end, at + _MOST_VARINT_BYTES)]):
        value |= (octet & 0x7F) << (7 * place)
        if octet < 0x80:
            if value >> 64:
                break
            return value, at + place + 1
    raise _malformed("a number is cut off or has more than 64 bits", at)


def _malformed(what: str, at: int) -> InputError:
    return InputError(f"a tf.train.Example is damaged at byte {at}: {what}")
