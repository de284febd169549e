"""What readers of several layouts share: ids, and images and labels in the dtypes of a store."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from fedda.errors import InputError

DEFLATE = 1032  # the most by which gzip can shrink anything

Arrays = dict[str, np.ndarray]  # over a client's examples; byte strings as objects


def check_id(client: str | bytes, file: Path, advice: str) -> None:
    """Refuses an id that cannot be stored as UTF-8; h5py gives such names as bytes."""
    if isinstance(client, bytes) or client.encode(errors="ignore").decode() != client:
        raise InputError(f"{file}: the client id {client!r} is not UTF-8. {advice}")


def pixels(values: np.ndarray, shape: tuple[int, ...], place: str, advice: str) -> np.ndarray:
    """Images as uint8, or as float32 if they are floats other than uint8 / 255."""
    if values.shape[1:] != shape:
        raise InputError(
            f"{place} has the shape {values.shape}, expected (examples, {str(shape)[1:]}. {advice}"
        )
    top = 1 if values.dtype.kind == "f" else 255
    if not ((values >= 0) & (values <= top)).all():  # nor is NaN
        raise InputError(f"{place} has values that are not in 0..{top}. {advice}")
    if values.dtype.kind != "f":
        return values.astype(np.uint8)
    floats = values.astype(np.float32)
    nearest = np.rint(floats * np.float32(255))
    return nearest.astype(np.uint8) if (nearest / np.float32(255) == floats).all() else floats


def labels(values: np.ndarray, classes: int, count: int, place: str, advice: str) -> np.ndarray:
    if values.dtype.kind not in "iu" or values.shape != (count,):
        raise InputError(
            f"{place} is {values.dtype} of the shape {values.shape}, expected integers of the "
            f"shape ({count},), one for each image. {advice}"
        )
    wrong = np.flatnonzero((values < 0) | (values >= classes))
    if len(wrong):
        raise InputError(
            f"{place} is {values[wrong[0]]} in example {wrong[0]}, expected 0 to {classes - 1}. "
            f"{advice}"
        )
    return values.astype(np.int32)


def are_bytes(clients: Iterable[tuple[str, Arrays]]) -> bool:
    """Whether the images of all clients are uint8."""
    return all(columns["x"].dtype == np.uint8 for _, columns in clients)


def stored(clients: Iterable[tuple[str, Arrays]], exact: bool) -> Iterator[tuple[str, Arrays]]:
    """The clients with images of one dtype: uint8 if they are `exact` in it, else float32."""
    for client, columns in clients:
        x = columns["x"]
        if not exact and x.dtype == np.uint8:
            x = x.astype(np.float32) / np.float32(255)
        yield client, columns | {"x": x}
