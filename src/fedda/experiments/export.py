"""Trained parameters in the formats of other libraries."""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from fedda.errors import InputError, import_extra
from fedda.simulate import saved
from fedda.storage.files import replacing
from fedda.storage.named_arrays import steps
from fedda.storage.snapshot import read_newest


def export(source: Path, file: Path) -> tuple[dict[str, np.ndarray], list[str]]:
    """Write the trained parameters to a file, whose name ends in .npz or .safetensors.

    Args:
        source: A run directory, or a file of `result.save`.
        file: The file.

    Returns:
        The arrays by the names that they have in the file, and notes for a person.
    """
    notes = list[str]()
    if source.is_dir():
        found = read_newest(source)
        arrays = found.arrays
        if not found.finished:
            notes.append(f"{source} is unfinished: its newest checkpoint is exported.")
    else:
        arrays = saved.read(source).arrays
    named = {_dotted(name): array for name, array in saved.parameters(arrays).items()}
    if not named:
        raise InputError(
            f"got {source}, which does not hold the parameters of one run; expected a run "
            "directory or a file of result.save. Give one of these."
        )
    if file.suffix == ".npz":
        halves = [name for name, array in named.items() if array.dtype == jnp.bfloat16]
        if halves:
            notes.append(".npz files lack bfloat16: these arrays are written as float32, exactly.")
        named |= {name: named[name].astype(np.float32) for name in halves}
        # numpy.savez takes names as keywords, and would refuse an array of the name "file".
        with replacing(file) as opened, zipfile.ZipFile(opened, "w") as archive:
            for name, array in named.items():
                with archive.open(f"{name}.npy", "w", force_zip64=True) as part:
                    np.lib.format.write_array(part, array, allow_pickle=False)
    else:
        _write_safetensors(file, named)
    return named, notes


def _dotted(name: str) -> str:
    """Return the name of an array as in PyTorch, such as `layers.0.kernel`."""
    return ".".join(str(key) for _, key in steps(name)) or "params"


def _write_safetensors(file: Path, named: Mapping[str, np.ndarray]) -> None:
    safetensors = import_extra("safetensors.numpy", "safetensors", "write .safetensors files")
    whole = {name: np.ascontiguousarray(array) for name, array in named.items()}
    with replacing(file) as opened:
        opened.write(safetensors.save(whole, metadata={"format": "pt"}))
