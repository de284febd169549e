"""The command `fedda export`: the arrays of other libraries' files are those of the result."""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import fedda as library
from helpers.commands import QUICK


def test_a_run_directory_is_exported_with_readable_names(fedda, tmp_path: Path):
    fedda("run", *QUICK, "-q", "--out", "run")
    code, out, _ = fedda("export", "run", "model.npz")
    assert code == 0
    assert out == "Written to model.npz: 2 arrays, 650 parameters\n"
    assert fedda("export", "run", "model.safetensors")[0] == 0
    params = library.load(tmp_path / "run").params
    expected = {f"out.{name}": params["out"][name] for name in ("kernel", "bias")}
    with np.load(tmp_path / "model.npz", allow_pickle=False) as file:
        arrays = dict(file)
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert arrays.keys() == tensors.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(arrays[name], array)
        np.testing.assert_array_equal(tensors[name], array)


def test_a_saved_result_in_bfloat16_is_exported_exactly(fedda, tmp_path: Path):
    model = library.Model(
        lambda key: [{"file": jnp.full((2, 1), 1.1, jnp.bfloat16)}],
        lambda params, x: (x.astype(jnp.bfloat16) @ params[0]["file"]).astype(jnp.float32),
    )
    clients = [(np.ones((n, 2)), np.ones((n, 1))) for n in (2, 3)]
    error = library.losses.squared_error
    result = library.run("fedavg", model, clients, error, rounds=2, cohort=2, progress=False)
    result.save(tmp_path / "model.fedda")
    _, _, notes = fedda("export", "model.fedda", "model.npz")
    assert "lack bfloat16: these arrays are written as float32, exactly" in notes
    assert fedda("export", "model.fedda", "model.safetensors")[0] == 0
    kernel = np.asarray(result.params[0]["file"])
    with np.load(tmp_path / "model.npz", allow_pickle=False) as file:
        np.testing.assert_array_equal(file["0.file"], kernel.astype(np.float32))
    tensors = safetensors.numpy.load_file(tmp_path / "model.safetensors")
    assert tensors["0.file"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(tensors["0.file"], kernel)


def test_nothing_is_overwritten_and_wrong_names_are_refused(fedda, tmp_path: Path):
    fedda("run", *QUICK, "-q", "--out", "run")
    (tmp_path / "model.npz").write_text("mine")
    code, _, message = fedda("export", "run", "model.npz")
    assert (code, (tmp_path / "model.npz").read_text()) == (2, "mine")
    assert "model.npz exists already. Delete it, or give another FILE." in message
    assert "ends in .npz or .safetensors" in fedda("export", "run", "model.pt")[2]
    assert "which does not exist; expected" in fedda("export", "absent", "new.npz")[2]
    assert "cannot write to" in fedda("export", "run", "absent/new.npz")[2]
    assert not (tmp_path / "new.npz").exists()


def test_without_safetensors_an_error_names_the_extra(fedda, monkeypatch: pytest.MonkeyPatch):
    fedda("run", *QUICK, "-q", "--out", "run")
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    code, _, message = fedda("export", "run", "model.safetensors")
    assert code == 2
    assert "pip install 'fedda[safetensors]'" in message
