"""Small valid files for every reader, and how they are read."""

import bz2
import gzip
import hashlib
import io
import json
import lzma
import pickle
import sys
import tarfile
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import h5py  # noqa: F401  (before processes are forked)
import numpy as np
import pandas  # noqa: F401
import pyarrow
import pyarrow.parquet

from fedda.data import archives, store
from fedda.data.readers import (
    cifar_python,
    emnist_original,
    leaf,
    stackexchange,
    table,
)
from fedda.errors import InputError
from fedda.storage.checkpoint import DIGEST
from fedda.storage.files import sealed

sys.path.append(str(Path(__file__).parents[1] / "data"))
import test_reader_cifar as cifar_files
import test_reader_emnist as emnist_files
import test_reader_stackexchange as exchange_files
import test_reader_tff as tff_files

Content = dict[str, bytes]  # of files, by path
Seal = Callable[[bytes], bytes]


class Sample(NamedTuple):
    """Valid files, and what reads them.

    Attributes:
        files: The content of the files, by path.
        read: Reads all that is in a folder.
        seals: For a file, what is done to damaged content, so that the damage is only found
            inside: it is packed, or gets a checksum that is right.
        sandboxed: Whether it is read in a child process, where a crash is an error in words.
    """

    files: Content
    read: Callable[[Path], object]
    seals: Mapping[str, Seal] = {}
    sandboxed: bool = True


def content(folder: Path) -> Content:
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def everything(reader: Any, name: str, place: Path, **options: Any) -> None:
    """Read all that a reader reads, as an import does."""
    if not reader.files(place, name):
        raise InputError("an import finds no files")
    found = reader.read(place, name, **options)
    for clients in found.splits.values():
        for client, columns in clients:
            store.encoded_id(client)
            store.num_examples(columns)
            assert all(isinstance(each, store.Rows | np.ndarray) for each in columns.values())
    for text in found.texts().values():
        text.encode()


def data_sets(folder: Path, executed: Path) -> dict[str, Sample]:
    """Return samples of the files that are imported; `executed` is what an attack leaves."""

    def made(name: str) -> Path:
        (folder / name).mkdir()
        return folder / name

    def sample(name: str, reader: Any, dataset: str, **seals: Seal) -> Sample:
        files = content(folder / name)
        seals = {file: seal for file in files for end, seal in seals.items() if file.endswith(end)}
        return Sample(files, lambda place: everything(reader, dataset, place), seals)

    found: dict[str, Sample] = {}
    rng = np.random.default_rng(0)
    for kind, name in (("h5", "emnist"), ("h5", "cifar100"), ("sqlite", "emnist")):
        place = made(f"{kind}-{name}")
        splits = {s: tff_files.images(name, rng, {"f1": 2, "é": 1}) for s in ("train", "test")}
        tff_files.WRITE[kind](place, name, splits)
        found[place.name] = sample(place.name, tff_files.READERS[kind], name)
    words = {"tokens": [b"how do i", b"it works"], "title": [b"a b", b"c"], "tags": [b"x|y", b"z"]}
    for kind in ("h5", "sqlite"):
        place = made(f"{kind}-stackoverflow")
        splits = {split: {"1": words, "22": words} for split in ("train", "held_out", "test")}
        tff_files.WRITE[kind](place, "stackoverflow", splits)
        found[place.name] = sample(place.name, tff_files.READERS[kind], "stackoverflow")
    emnist_files.idx_folder(made("idx"))
    emnist_files.idx_folder(made("idx-gz"), packed=True)
    emnist_files.mat_folder(made("mat"), packed=False)
    emnist_files.mat_folder(made("mat-packed"))
    for name in ("idx", "idx-gz", "mat", "mat-packed"):
        found[name] = sample(name, emnist_original, "emnist", gz=gzip.compress)
    for kind in ("protocol 2", "protocol 4", "python 2"):
        place = made(f"cifar {kind}")
        for split in ("train", "test"):
            (place / split).write_bytes(cifar_files.FILES[kind])
        found[place.name] = sample(place.name, cifar_python, "cifar100")
    place = made("cifar attacks")
    for split, (_, attack) in zip(("train", "test"), cifar_files.attacks(executed), strict=False):
        (place / split).write_bytes(pickle.dumps(attack, 2))
    found[place.name] = sample(place.name, cifar_python, "cifar100")
    place = made("leaf") / "train"
    place.mkdir()
    pixels = [[round(value, 3) for value in rng.random(784)] for _ in range(2)]
    users = {name: {"x": pixels, "y": [3, 61]} for name in ("f1", "é")}
    whole = json.dumps({"users": [*users], "num_samples": [2, 2], "user_data": users})
    (place / "a.json").write_text(whole)
    (made("leaf/test") / "b.json").write_text(whole)
    found["leaf"] = sample("leaf", leaf, "emnist")
    question, answer = exchange_files.question, exchange_files.answer
    lines = [question(i, i, "<p>a &amp; b</p>", "how?", "<t><u>") for i in (1, 10, 20)]
    exchange_files.dump(made("stackexchange") / "site", *lines, answer(4, 3, "<p>so</p>", 1))
    found["stackexchange"] = sample("stackexchange", stackexchange, "stackexchange")
    return found | tables() | packed()


def tables() -> dict[str, Sample]:
    rows = [("client", "label", "age", "sex", "town")]
    rows += [(f"c{i % 3}", i % 2, 20.5 + i, "fm"[i % 2], "xyz"[i % 3]) for i in range(12)]
    csv = "\n".join(",".join(map(str, row)) for row in rows).encode() + b"\n"
    columns = dict(zip(rows[0], zip(*rows[1:], strict=True), strict=True))
    parquet, npz = io.BytesIO(), io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({k: list(v) for k, v in columns.items()}), parquet)
    client = np.array([f"c{i % 3}" for i in range(12)])
    np.savez(npz, x=np.arange(24.0).reshape(12, 2), y=np.arange(12) % 2, client=client)
    files = {"csv": csv, "tsv": csv.replace(b",", b"\t")}
    files |= {"parquet": parquet.getvalue(), "npz": npz.getvalue()}
    return {
        kind: Sample({f"a.{kind}": data}, lambda place: everything(table, "mine", place))
        for kind, data in files.items()
    }


def packed() -> dict[str, Sample]:
    """Return samples of archives."""
    tar, archive = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as file:
        for name in ("a/b.csv", "a/c/d.csv"):
            member = tarfile.TarInfo(name)
            member.size = 9
            file.addfile(member, io.BytesIO(b"a,b\n1,2\n\n"))
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
        zipped.writestr("a/b.csv", "a,b\n1,2\n" * 9)
        zipped.writestr("a/c/d.csv", "a,b\n1,2\n")
    plain = tar.getvalue()[: 512 * 8]
    packers = {"tar": bytes, "tar.gz": gzip.compress, "tar.bz2": bz2.compress, "txz": lzma.compress}

    def read(file: str) -> Callable[[Path], object]:
        def unpack(place: Path) -> None:
            into = place / "unpacked"
            archives.unpack(place / file, into, 10**6)
            for path in place.rglob("*"):
                assert not path.is_symlink()

        return unpack

    found = {
        kind: Sample({f"a.{kind}": pack(plain)}, read(f"a.{kind}"), {f"a.{kind}": pack})
        for kind, pack in packers.items()
    }
    # What is damaged before it is packed is the plain archive.
    found |= {
        f"{kind} inside": Sample({f"a.{kind}": plain}, read(f"a.{kind}"), {f"a.{kind}": pack})
        for kind, pack in packers.items()
    }
    return found | {"zip": Sample({"a.zip": archive.getvalue()}, read("a.zip"))}


# --------------------------------------------------------------------------------- our own files


def resealed(data: bytes) -> bytes:
    """Return a checkpoint, or the file of a result, with a checksum that is right."""
    return data[:-DIGEST] + hashlib.sha256(data[:-DIGEST]).digest()


def resealed_text(data: bytes) -> bytes:
    return sealed(data.partition(b"\n")[2].decode(errors="replace")).encode()


def write_own(folder: Path, run: Path) -> None:
    """Write files as this library does, some from a finished run. This starts JAX."""
    import fedda
    from fedda.experiments import compare
    from fedda.reports.runs import read_runs
    from fedda.tasks import config
    from fedda_reproduction.paper import cells

    rng = np.random.default_rng(0)
    clients = [(f"c{n}", {"x": rng.random((n, 2)), "y": np.arange(n)}) for n in (3, 2)]
    store.write(folder / "store", store.Source({"train": clients, "test": clients}), {"path": "/"})
    cells.add(folder / "results", *read_runs([run]))
    for name in ("compare", "result", "config"):
        (folder / name).mkdir()
    plans = "".join(f"[a-seed{n}]\n{config.dump(config.resolve({'seed': n}))}\n" for n in (0, 1))
    (folder / "compare" / compare.FILE).write_text(sealed(plans))
    settings = config.dump(config.resolve({"algorithm": "fedda-adam"}))
    (folder / "config" / "a.toml").write_text(settings)
    fedda.load(run).save(folder / "result" / "a.fedda")


def own_files(folder: Path, run: Path) -> dict[str, Sample]:
    """Return samples of what `write_own` wrote, and of the run."""
    import fedda
    from fedda.experiments import compare
    from fedda.reports import comparison, html
    from fedda.reports.runs import read_runs
    from fedda.storage.directory import RunDirectory
    from fedda.storage.snapshot import read_settings
    from fedda.tasks import config
    from fedda_reproduction.paper import cells

    def read_store(place: Path) -> None:
        try:
            for split in store.open_store(place).splits.values():
                for client in range(split.num_clients):
                    for name in split.fields:
                        split.column(name, client)
            store.verify(place)
        except store.Stale as stale:
            raise InputError(str(stale)) from None

    def resume(place: Path) -> None:
        settings = read_settings(place)
        config.resolve(settings)
        with RunDirectory(place, settings) as directory, suppress(InputError):
            directory.read_back(lambda: {"w": np.zeros((3, 2))})  # another state than the run's

    def report(place: Path) -> None:
        html.render("comparison.md", **comparison.content(read_runs([place]))).encode()

    def sealed_cell(data: bytes) -> bytes:
        with suppress(ValueError, RecursionError, KeyError, TypeError):
            read = json.loads(data)
            del read["checksum"]
            return json.dumps(read | {"checksum": cells._hash(read)}).encode()
        return data

    files = {name: data for name, data in content(run).items() if not name.startswith(".")}
    seals: dict[str, Seal] = {name: resealed for name in files if "round-" in name}
    seals["config.toml"] = resealed_text
    kept = {
        name: content(folder / name) for name in ("store", "results", "compare", "result", "config")
    }
    found = {
        "store": Sample(kept["store"], read_store),
        "load a run": Sample(files, fedda.load, seals),
        "resume": Sample(files, resume, seals),
        "report": Sample(files, report, seals),
        "result": Sample(
            kept["result"], lambda place: fedda.load(place / "a.fedda"), {"a.fedda": resealed}
        ),
        "cells": Sample(
            kept["results"], cells.read_all, dict.fromkeys(kept["results"], sealed_cell)
        ),
        "comparison": Sample(kept["compare"], compare.written, {compare.FILE: resealed_text}),
        "config": Sample(
            kept["config"],
            lambda place: config.resolve(config.from_words([str(place / "a.toml")])),
        ),
    }
    return {name: sample._replace(sandboxed=False) for name, sample in found.items()}


def message() -> Sample:
    """Return the arrays of a Flower message."""
    from flwr.app import Array

    from fedda.flower import messages

    value = np.arange(6.0, dtype=np.float32).reshape(2, 3)

    def read(place: Path) -> None:
        data = b"".join(file.read_bytes() for file in place.iterdir())
        try:
            found = messages.read_array(
                Array("float32", (2, 3), "numpy.ndarray", data), "a", np.dtype("f4"), (2, 3)
            )
        except messages.MessageError as error:
            raise InputError(str(error)) from None
        assert (found.shape, found.dtype) == (value.shape, value.dtype)

    return Sample({"array": Array(value).data}, read, sandboxed=False)
