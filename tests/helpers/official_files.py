"""Small files in the layouts of the official downloads, as the page about data uses them."""

import io
import pickle
import tarfile
from pathlib import Path

import h5py
import numpy as np

from helpers.archives import tar_bz2


def write_emnist(archive: Path, scratch: Path) -> str:
    """Write the archive of TFF's EMNIST with twelve writers, and return its checksum."""
    rng = np.random.default_rng(0)
    scratch.mkdir()
    for split in ("train", "test"):
        with h5py.File(scratch / f"fed_emnist_{split}.h5", "w") as file:
            for writer in range(12):
                pixels = rng.integers(0, 256, (5, 28, 28)) / 255
                file[f"examples/f{writer:04}_00/pixels"] = pixels.astype(np.float32)
                file[f"examples/f{writer:04}_00/label"] = rng.integers(0, 62, 5).astype(np.int32)
    return tar_bz2(archive, {path.name: path.read_bytes() for path in scratch.iterdir()})


def write_cifar100(archive: Path) -> None:
    """Write CIFAR-100's archive of pickles with 800 images."""
    rng = np.random.default_rng(0)
    with tarfile.open(archive, "w:gz") as file:
        for split, size in (("train", 600), ("test", 200)):
            fine = np.arange(size) % 100
            table = {
                b"data": rng.integers(0, 256, (size, 3072)).astype(np.uint8),
                b"fine_labels": fine.tolist(),
                b"coarse_labels": (fine // 5).tolist(),
            }
            content = pickle.dumps(table, protocol=2)
            member = tarfile.TarInfo(f"cifar-100-python/{split}")
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
