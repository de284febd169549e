"""Results as files and from run directories: the same numbers come back, or an error says why."""

import json
import os
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas
import pytest
from flax import nnx

import fedda
from fedda.data import datasets
from fedda.errors import InputError
from fedda.experiments import run as experiment
from fedda.simulate import saved
from fedda.storage import checkpoint
from fedda.tasks import config

RNG = np.random.default_rng(0)
CLIENTS = [(RNG.normal(size=(n, 3)), RNG.integers(0, 2, n)) for n in (4, 7, 2, 5, 6)]
X = RNG.normal(size=(5, 3))
LOSS, ACCURACY = fedda.losses.cross_entropy, fedda.losses.accuracy
SETTINGS: dict[str, Any] = {
    "rounds": 4,
    "eval_every": 2,
    "cohort": 2,
    "batch": 2,
    "test": CLIENTS,
    "metrics": [ACCURACY],
    "progress": False,
}


def of_type(dtype: str) -> fedda.Model:
    """A model whose parameters are in tuples and lists."""
    return fedda.Model(
        lambda key: ([jax.random.normal(key, (3, 2), dtype)], {"b": (jnp.zeros((1, 2), dtype),)}),
        lambda params, x: (
            x.astype(dtype) @ params[0][0] + params[1]["b"][0]
        ).astype(jnp.result_type(float)),
    )  # fmt: skip


MODELS = {
    "own": of_type("float32"),
    "bfloat16": of_type("bfloat16"),
    "nnx": fedda.models.from_nnx(
        lambda rngs: nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs))
    ),
    "equinox": fedda.models.from_equinox(lambda key: eqx.nn.MLP(3, 2, 4, 1, key=key)),
}


def trained(model: fedda.Model, algorithm: Any = "scaffold", **settings: Any) -> fedda.Result:
    return fedda.run(algorithm, model, CLIENTS, LOSS, **SETTINGS | settings)


def assert_same(ours: fedda.Result, theirs: fedda.Result) -> None:
    """The same names, types and bits, also of what clients keep, and the same history."""
    one, other = (checkpoint.on_host((each.state, each.memory)) for each in (ours, theirs))
    assert list(one) == list(other)
    for name, array in one.items():
        assert array.dtype == other[name].dtype
        np.testing.assert_array_equal(array, other[name])
    assert str(ours.history) == str(theirs.history)


# --------------------------------------------------------------------------------------- as a file


@pytest.mark.parametrize("name", MODELS)
def test_a_result_comes_back_from_its_file(name: str, tmp_path: Path):
    model = MODELS[name]
    result = trained(model, per_client=True)
    result.save(tmp_path / "model.fedda")
    assert os.listdir(tmp_path) == ["model.fedda"], "one file, and nothing beside it"
    again = fedda.load(tmp_path / "model.fedda", model=model)
    assert_same(again, result)
    assert jax.tree.structure(again.params) == jax.tree.structure(result.params)
    assert again.settings == result.settings
    assert again.per_client.to_json() == result.per_client.to_json()
    assert repr(again) == repr(result)
    np.testing.assert_array_equal(again.predict(X), result.predict(X))


def test_float64_comes_back_exactly_and_is_refused_where_jax_would_round_it(x64, tmp_path: Path):
    result = trained(of_type("float64"))
    result.save(tmp_path / "model.fedda")
    again = fedda.load(tmp_path / "model.fedda", of_type("float64"))
    assert again.params[0][0].dtype == np.float64
    assert_same(again, result)
    with (
        jax.enable_x64(False),
        pytest.raises(InputError, match=r"with float64 in .*expected float32.*JAX_ENABLE_X64=1"),
    ):
        fedda.load(tmp_path / "model.fedda")


@pytest.mark.parametrize("memory_gb", [4.0, 1e-9])
@pytest.mark.parametrize("name", ["own", "equinox"])
def test_a_run_continues_from_a_loaded_result(name: str, memory_gb: float, tmp_path: Path):
    """Without its model, too, and with client memory on the device or on the host."""
    model, settings = MODELS[name], {"memory_gb": memory_gb, "algorithm": "scaffold"}
    first = trained(model, **settings)
    assert jax.tree.leaves(first.memory)
    first.save(tmp_path / "part")
    whole = trained(model, start=first, **settings)
    assert_same(trained(model, start=fedda.load(tmp_path / "part"), **settings), whole)
    assert_same(trained(model, start=fedda.load(tmp_path / "part", model), **settings), whole)


def test_without_the_model_parameters_are_dictionaries_and_predict_says_what_is_missing(
    tmp_path: Path,
):
    result = trained(MODELS["own"])
    result.save(tmp_path / "model.fedda")
    again = fedda.load(tmp_path / "model.fedda")
    assert jax.tree.structure(again.params) == jax.tree.structure({0: {0: 0}, 1: {"b": {0: 0}}})
    np.testing.assert_array_equal(again.params[0][0], result.params[0][0])
    with pytest.raises(InputError, match=r"predict needs the model.*load\(path, model=model\)"):
        again.predict(X)


def test_a_result_is_saved_to_a_file_in_a_folder_that_exists(tmp_path: Path):
    result = trained(fedda.models.linear(3, 2), "fedavg")
    for path, why in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "model", "is in a folder that does not exist"),
    ):
        with pytest.raises(InputError, match=f"got {path}, which {why}; expected a file"):
            result.save(path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    "model",
    [
        fedda.models.linear(3, 2),
        fedda.models.mlp(3, classes=2, hidden=4),
        fedda.models.autoencoder(features=3),
    ],
)
def test_built_in_models_are_made_again(model: fedda.Model, tmp_path: Path):
    result = trained(model, "fedavg", directory=tmp_path / "run")
    result.save(tmp_path / "file")
    for path in ("file", "run"):
        np.testing.assert_array_equal(fedda.load(tmp_path / path).predict(X), result.predict(X))


def test_a_built_in_model_with_other_inputs_is_not_taken_for_the_original(tmp_path: Path):
    doubled = fedda.models.with_input(fedda.models.linear(3, 2), lambda x: 2 * x)
    result = trained(doubled, "fedavg")
    result.save(tmp_path / "file")
    assert fedda.load(tmp_path / "file").model is None
    again = fedda.load(tmp_path / "file", doubled)
    np.testing.assert_array_equal(again.predict(X), result.predict(X))


def test_the_preparation_of_a_table_is_saved_with_the_model(tmp_path: Path):
    table = pandas.DataFrame(
        {
            "client": ["north", "south"] * 20,
            "age": [None, *RNG.normal(50, 10, 39)],
            "ward": RNG.choice(["A", "B"], 40),
            "label": RNG.choice(["well", "ill"], 40),
        }
    )
    hospitals = fedda.federation(table)
    result = fedda.run(
        "fedavg",
        fedda.models.linear(hospitals.num_features, 2),
        hospitals,
        LOSS,
        rounds=2,
        cohort=2,
        directory=tmp_path / "run",
        progress=False,
    )
    result.save(tmp_path / "file")
    for path in ("file", "run"):
        again = fedda.load(tmp_path / path)
        assert again.settings["classes"] == ["ill", "well"]
        np.testing.assert_array_equal(again.predict(table), result.predict(table))


# ------------------------------------------------------------------------- what a file must not be


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("kept") / "model.fedda"
    trained(MODELS["own"]).save(path)
    return path


@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 1.0])
def test_a_damaged_file_is_refused(place: float, kept: Path, tmp_path: Path):
    content = bytearray(kept.read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    (tmp_path / "damaged").write_bytes(content)
    with pytest.raises(InputError, match=r"got .*damaged, which is .*; expected a file of"):
        fedda.load(tmp_path / "damaged")
    (tmp_path / "damaged").write_bytes(kept.read_bytes()[: -1 - int(place * 100)])
    with pytest.raises(InputError, match="its checksum does not match"):
        fedda.load(tmp_path / "damaged")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x80\x04", b'{"round": 3}'])
def test_other_files_are_refused(content: bytes, tmp_path: Path):
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(InputError, match=r"expected a file of result\.save, or a run directory"):
        fedda.load(tmp_path / "other")
    with pytest.raises(InputError, match="does not exist; expected"):
        fedda.load(tmp_path / "absent")
    with pytest.raises(InputError, match=r"not a run directory: it has no config\.toml"):
        fedda.load(tmp_path)


def test_a_checkpoint_and_a_foreign_file_with_a_checksum_are_refused(tmp_path: Path):
    trained(MODELS["own"], directory=tmp_path / "run")
    [newest, *_] = (tmp_path / "run" / "checkpoints").iterdir()
    with pytest.raises(InputError, match=r"is a checkpoint; .* Give the run directory"):
        fedda.load(newest)
    for number, notes in enumerate(({"kind": "result"}, ["result"])):
        checkpoint.write(tmp_path / f"{number}", 3, {}, notes)
        with pytest.raises(InputError, match="which cannot be read: "):
            fedda.load(tmp_path / f"{number}")


@pytest.mark.parametrize("name", ["", ".state", "['state']", ".state.other", ".state['params']"])
def test_a_result_with_arrays_of_other_names_is_refused(name: str, kept: Path, tmp_path: Path):
    arrays, notes = saved.read(kept)
    named = {name: next(iter(arrays.values()))}
    checkpoint.write(tmp_path / "crafted", 4, named, notes)
    with pytest.raises(InputError, match="whose arrays are not those of a result"):
        fedda.load(tmp_path / "crafted")


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as newer:
        newer.setattr(saved, "VERSION", saved.VERSION + 1)
        trained(MODELS["own"]).save(tmp_path / "new")
    with pytest.raises(InputError, match=r"has written; expected a file of fedda .* Install"):
        fedda.load(tmp_path / "new")


def test_another_model_is_refused(kept: Path):
    with pytest.raises(InputError, match=r"the model in .* is of another .* Give the model that"):
        fedda.load(kept, MODELS["nnx"])


def test_a_file_that_cannot_be_written_leaves_the_old_one(kept: Path, tmp_path: Path, monkeypatch):
    path = tmp_path / "model.fedda"
    path.write_bytes(kept.read_bytes())

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        trained(MODELS["own"], "fedavg").save(path)
    assert path.read_bytes() == kept.read_bytes()
    assert os.listdir(tmp_path) == ["model.fedda"]


def test_large_client_memory_is_left_out_with_a_warning(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setattr(saved, "MOST_MEMORY", 10)
    trained(MODELS["own"]).save(tmp_path / "file")
    assert "without the memory of the clients" in caplog.text
    again = fedda.load(tmp_path / "file")
    assert again.memory == ()
    with pytest.raises(InputError, match=r"in it \.memory.* is absent"):
        trained(MODELS["own"], start=again)


# -------------------------------------------------------------------------------- run directories


def test_a_directory_of_python_comes_back_finished_or_not(tmp_path: Path):
    model = MODELS["equinox"]

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 4:
            raise KeyboardInterrupt

    settings = {"directory": tmp_path / "run", "checkpoint_every": 1, "rounds": 6}
    with pytest.raises(KeyboardInterrupt):
        trained(model, on_evaluation=stop, **settings)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    part = fedda.load(tmp_path / "run", model)
    assert part.settings["finished"] is False
    assert repr(part).startswith("Result(scaffold, 4 rounds, unfinished, accuracy ")
    assert {path: path.read_bytes() for path in before} == before
    result = trained(model, per_client=True, **settings)
    again = fedda.load(tmp_path / "run", model)
    assert_same(again, result)
    assert again.settings["finished"] is True
    assert again.per_client.to_json() == result.per_client.to_json()
    np.testing.assert_array_equal(again.predict(X), result.predict(X))


def test_a_directory_without_a_checkpoint_is_refused(tmp_path: Path):
    trained(MODELS["own"], directory=tmp_path)
    for path in (tmp_path / "checkpoints").iterdir():
        path.unlink()
    with pytest.raises(InputError, match=r"has no checkpoint yet\. Continue the run"):
        fedda.load(tmp_path)


def test_a_directory_of_the_command_comes_with_the_model_of_its_task(tmp_path: Path):
    small = config.resolve({"per_client": True, "clients": 12, "rounds": 2, "model": "linear"})
    outcome = experiment.run(small, tmp_path / "run")
    again = fedda.load(tmp_path / "run")
    assert_same(again, outcome.result)
    assert repr(again) == repr(outcome.result)
    assert again.per_client.to_json() == outcome.result.per_client.to_json()
    images = RNG.integers(0, 17, (3, 8, 8))
    np.testing.assert_array_equal(again.predict(images), outcome.result.predict(images))
    again.save(tmp_path / "file")
    np.testing.assert_array_equal(
        fedda.load(tmp_path / "file").predict(images), again.predict(images)
    )


def test_a_damaged_directory_is_refused(tmp_path: Path):
    trained(MODELS["own"], directory=tmp_path)
    [*_, newest] = sorted((tmp_path / "checkpoints").iterdir())
    content = newest.read_bytes()
    newest.write_bytes(content[:-1])
    with pytest.raises(InputError, match="its checksum does not match"):
        fedda.load(tmp_path)
    newest.write_bytes(content)
    rows = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(rows.replace('"round": 2', '"round": 3'))
    with pytest.raises(InputError, match=r"metrics\.jsonl is damaged"):
        fedda.load(tmp_path)
    assert json.loads(rows.splitlines()[1])["round"] == 2


def test_a_run_of_the_command_on_a_table_predicts_new_rows(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path / "data"))
    rows = [
        f"{'north' if i % 2 else 'south'},{i % 7},{'AB'[i % 2]},{'yn'[i % 3 == 0]}"
        for i in range(60)
    ]
    (tmp_path / "visits.csv").write_text("\n".join(["client,age,ward,label", *rows]))
    datasets.import_files("visits", tmp_path / "visits.csv")
    settings = {"task": "own", "data": "visits", "rounds": 2, "cohort": 2}
    outcome = experiment.run(config.resolve(settings), tmp_path / "run")
    found, new = fedda.load(tmp_path / "run"), {"age": None, "ward": " A"}
    assert found.settings["classes"] == ["n", "y"]
    np.testing.assert_array_equal(found.predict(new), outcome.result.predict(new))


def test_a_module_is_taken_as_the_model(tmp_path: Path):
    module = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    result = fedda.run("fedavg", module, CLIENTS, LOSS, **SETTINGS)
    result.save(tmp_path / "model.fedda")
    again = fedda.load(tmp_path / "model.fedda", model=module)
    np.testing.assert_array_equal(again.predict(X), result.predict(X))
