"""A dictionary of plain values and arrays of bytes, from a pickle that is not run.

A pickle is a program, so a file from elsewhere is not given to `pickle`. The few instructions that
such a dictionary needs are carried out here; any other ends the reading. A name in the file such
as `numpy.dtype` stays a name: nothing is imported and nothing is called, so a hostile file has
nothing to work with.
"""

import io
import math
import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from fedda.errors import InputError

# What a pickle may be made of. The argument of these instructions is the value itself:
PLAIN = {
    *("BININT1", "BININT2", "BININT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
    *("SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
PYTHON_2 = {"BINSTRING", "SHORT_BINSTRING"}  # bytes, which pickletools reads as Latin-1
CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
OTHERS = {
    *("PROTO", "FRAME", "STOP", "MARK", "TUPLE", "EMPTY_LIST", "APPEND", "APPENDS"),
    *("EMPTY_DICT", "SETITEM", "SETITEMS", "BINPUT", "LONG_BINPUT", "MEMOIZE"),
    *("BINGET", "LONG_BINGET", "GLOBAL", "STACK_GLOBAL", "REDUCE", "BUILD"),
}
ALLOWED = PLAIN | PYTHON_2 | CONSTANTS.keys() | TUPLES.keys() | OTHERS
INSTRUCTIONS = {each.code.encode("latin-1"): each for each in pickletools.opcodes}

# NumPy 2 renamed the module of `_reconstruct`.
NAMES = {
    "_codecs.encode": "encode",
    "numpy.core.multiarray._reconstruct": "_reconstruct",
    "numpy._core.multiarray._reconstruct": "_reconstruct",
    "numpy.ndarray": "ndarray",
    "numpy.dtype": "dtype",
}


@dataclass(frozen=True)
class _Name:
    """One of the functions and classes that a file may name."""

    meaning: str


class _Made:
    """What a file asks to be made: the dtype of bytes, or an array, whose content comes later."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.array: np.ndarray | None = None


T = TypeVar("T")


def read(path: Path) -> dict[str, Any]:
    """The dictionary in a file, its keys as text."""
    data = path.read_bytes()
    try:
        table = _run(path, data)
    except InputError:
        raise
    except (ValueError, IndexError, KeyError, TypeError) as error:
        # The instructions do not fit each other, for example because bytes are missing.
        raise InputError(f"{path} is damaged or cut short ({error}). Download it anew.") from None
    if not isinstance(table, dict):
        raise InputError(f"{path} holds a {type(table).__name__}, expected a dictionary.")
    return {key: value.array if isinstance(value, _Made) else value for key, value in table.items()}


def _run(path: Path, data: bytes) -> Any:
    """Carries out the instructions of a pickle, each of which works on a stack."""
    file = io.BytesIO(data)
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    # CIFAR-100 needs ten instructions for an image, which has 3072 bytes. Encoded text is never
    # longer than it is in the file. Both bound what a small file can ask for.
    steps, encoded = 1000 + len(data) // 100, 0

    def since_mark() -> list[Any]:
        mark = marks.pop()
        values = stack[mark:]
        del stack[mark:]
        return values

    for _ in range(steps):
        name, argument = _next(path, file)
        match name:
            case "MARK":
                marks.append(len(stack))
            case "BINPUT" | "LONG_BINPUT":
                memo[argument] = stack[-1]
            case "MEMOIZE":
                memo[len(memo)] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[argument])
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "TUPLE":
                stack.append(tuple(since_mark()))
            case "APPEND" | "APPENDS":
                values = since_mark() if name == "APPENDS" else [stack.pop()]
                _a(list, stack[-1]).extend(values)
            case "SETITEM" | "SETITEMS":
                values = since_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
                keys = [_text(key) for key in values[::2]]
                _a(dict, stack[-1]).update(zip(keys, values[1::2], strict=True))
            case "GLOBAL":
                stack.append(_named(path, argument.replace(" ", ".")))
            case "STACK_GLOBAL":
                attribute, module = stack.pop(), stack.pop()
                stack.append(_named(path, f"{_text(module)}.{_text(attribute)}"))
            case "REDUCE":
                arguments, function = _a(tuple, stack.pop()), _a(_Name, stack.pop())
                made = _made(path, function.meaning, arguments)
                encoded += len(made) if isinstance(made, bytes) else 0
                if encoded > len(data):
                    raise ValueError("it encodes one text many times")
                stack.append(made)
            case "BUILD":
                state = _a(tuple, stack.pop())
                _fill(_a(_Made, stack[-1]), state)
            case "STOP":
                return stack.pop()
            case "PROTO" | "FRAME":
                pass
            case _ if name in TUPLES:
                stack.append(_last(stack, TUPLES[name]))
            case _ if name in CONSTANTS:
                stack.append(CONSTANTS[name])
            case _ if name in PYTHON_2:
                stack.append(argument.encode("latin-1"))
            case _:
                stack.append(argument)
    raise ValueError("it has more instructions than such a file needs")


def _next(path: Path, file: io.BytesIO) -> tuple[str, Any]:
    """The next instruction, known to be harmless before its argument is read."""
    code = file.read(1)
    if not code:
        raise ValueError("it ends too soon")
    instruction = INSTRUCTIONS.get(code)
    if instruction is None or instruction.name not in ALLOWED:
        shown = repr(code) if instruction is None else instruction.name
        raise InputError(
            f"{path} has the instruction {shown} at byte {file.tell() - 1}, which plain data "
            "do not need: the file is damaged or could do harm. It was not run."
        )
    return instruction.name, instruction.arg.reader(file) if instruction.arg else None


def _named(path: Path, name: str) -> _Name:
    if name not in NAMES:
        raise InputError(
            f"{path} names {name!r}, which plain data do not need: the file could do harm. It was "
            "not run."
        )
    return _Name(NAMES[name])


def _made(path: Path, function: str, arguments: tuple[Any, ...]) -> bytes | _Made:
    """What a call in the file stands for; the call itself is never made."""
    match function, arguments:
        case "encode", (str(text), "latin1"):
            return text.encode("latin-1")
        case "_reconstruct", (_Name("ndarray"), (0,), b"b"):
            return _Made("array")
        case "dtype", ("u1" | b"u1", 0, 1):  # False and True are equal to 0 and 1
            return _Made("dtype")
    raise InputError(
        f"{path} calls {function} in a way that plain data do not need, whose arrays are of the "
        "dtype uint8. It was not run."
    )


def _fill(made: _Made, state: tuple[Any, ...]) -> None:
    if made.kind == "dtype":
        return  # the rest of its state is a byte order, and bytes have none
    _, shape, dtype, columns_first, raw = state
    shape = tuple(_a(int, length) for length in _a(tuple, shape))
    if _a(_Made, dtype).kind != "dtype" or math.prod(shape) != len(_a(bytes, raw)):
        raise ValueError(f"an array of the shape {shape} does not have {len(raw)} bytes")
    order: Literal["C", "F"] = "F" if columns_first else "C"
    made.array = np.frombuffer(raw, np.uint8).reshape(shape, order=order)


def _a(kind: type[T], value: Any) -> T:
    if not isinstance(value, kind):
        raise TypeError(f"a {type(value).__name__} stands where a {kind.__name__} belongs")
    return value


def _text(value: Any) -> str:
    """Text, which files of Python 2 hold as bytes."""
    return value.decode("latin-1") if isinstance(value, bytes) else _a(str, value)


def _last(stack: list[Any], count: int) -> tuple[Any, ...]:
    if len(stack) < count:
        raise IndexError("a value is missing")
    values = tuple(stack[-count:])
    del stack[-count:]
    return values
