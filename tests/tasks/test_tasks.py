"""Tasks: what each trains on, and what the settings of its pipelines change."""

import importlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedda import tasks
from fedda.data import datasets, preprocessing, store
from fedda.data.federation import Shards
from fedda.data.store import Rows, Source
from fedda.data.streaming import Feed
from fedda.errors import InputError
from fedda.experiments import run as experiment
from fedda.models import Model
from fedda.tasks import common, config, own, stackoverflow

RNG = np.random.default_rng(0)


def images(shape, classes, counts):
    for number, count in enumerate(counts):
        x = RNG.integers(0, 256, (count, *shape)).astype(np.uint8)
        y = RNG.integers(0, classes, count).astype(np.int32)
        yield f"{number:03}", {"x": x, "y": y, "coarse": y // 5}


def texts(counts):
    """Words and tags of Zipf's kind, among them some that no vocabulary has."""
    for number, count in enumerate(counts):
        length, tags = RNG.integers(0, 9, count), RNG.integers(0, 4, count)
        words = RNG.zipf(1.3, length.sum()).clip(1, 65_535).astype(np.uint16) - 1
        ranks = RNG.zipf(1.5, tags.sum()).clip(1, 600).astype(np.uint16) - 1
        yield f"{number:03}", {"x": Rows(words, length), "y": Rows(ranks, tags)}


@pytest.fixture(autouse=True)
def stores(tmp_path, monkeypatch):
    """Small data sets in the place where the command keeps them."""
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path))
    tasks._load.cache_clear()
    train, test = [3, 25, 1, 14, 30], [4, 0, 9]
    for name, shape, classes in (("emnist", (28, 28), 62), ("cifar100", (32, 32, 3), 100)):
        splits = {"train": images(shape, classes, train), "test": images(shape, classes, test)}
        store.write(tmp_path / name, Source(splits), {})
    for name in ("stackoverflow", "stackexchange"):
        splits = {"train": texts(train), "held_out": texts(test), "test": texts([7, 12])}
        tags = "".join(f"tag{rank}\n" for rank in range(600))
        store.write(tmp_path / name, Source(splits, lambda tags=tags: {"tags.txt": tags}), {})
    splits = {"train": images((6, 6), 3, train), "test": images((6, 6), 3, test)}
    store.write(tmp_path / "mine", Source(splits), {})
    return tmp_path


SMALL = ("cohort=3", "rounds=2", "eval_every=2", "batch=10")


@pytest.mark.parametrize(
    ("task", "parameters", "metric"),
    [
        ("digits", 4_810, "accuracy"),
        ("synthetic", 610, "accuracy"),
        ("emnist", 1_206_590, "accuracy"),
        ("emnist-autoencoder", 2_837_314, "mse"),
        ("stackoverflow", 5_000_500, "recall_at_5"),
        ("stackexchange", 5_000_500, "recall_at_5"),
        ("own", 5_123, "accuracy"),
    ],
)
def test_every_task_trains(task, parameters, metric, tmp_path):
    """64*64 + 64 + 64*10 + 10; 60*10 + 10; spec C.3; 36*128 + 128 + 128*3 + 3."""
    words = [f"task={task}", *SMALL] + (["data=mine"] if task == "own" else [])
    resolved = config.resolve(config.parse(words))
    done = experiment.run(resolved, tmp_path / "run")
    assert done.summary["parameters"] == parameters
    assert done.summary["metric"] == metric
    assert np.isfinite(done.summary["final"][metric])
    assert done.summary["nonfinite_clients"] == 0


def test_the_whole_test_set_is_evaluated_at_the_end(tmp_path, monkeypatch):
    """With the numbers that its evaluation in one piece gives; and not if it was that already."""
    words = ["task=stackoverflow", "validation=test", "vocabulary=100", "tags=50", *SMALL]
    resolved = config.resolve(config.parse(words))
    small = experiment.run(resolved, tmp_path / "small").summary
    assert "whole_test_set" not in small
    monkeypatch.setattr(stackoverflow, "VALIDATION", 18)  # of 19
    monkeypatch.setattr(stackoverflow, "BLOCK", 5)
    tasks._load.cache_clear()
    large = experiment.run(resolved, tmp_path / "large").summary
    assert large["final"]["loss"] != pytest.approx(small["final"]["loss"], rel=1e-4)
    for name in ("loss", "recall_at_5"):
        assert large["whole_test_set"][name] == pytest.approx(small["final"][name], rel=1e-5)


def load(task, **options):
    return tasks.load(config.resolve({"task": task, **options}))


def test_data_that_are_too_large_stay_on_disk():
    assert isinstance(load("stackoverflow").shards, Shards)
    assert isinstance(load("stackoverflow", data_gb=1e-6).shards, Feed)
    assert isinstance(load("emnist", data_gb=1e-6).shards, Feed)


@pytest.mark.parametrize("data_gb", [8.0, 1e-6])
def test_a_client_has_its_first_examples_up_to_the_cap(data_gb):
    shards = load("stackoverflow", cap=10, data_gb=data_gb).shards
    assert np.asarray(shards.count).tolist() == [3, 10, 1, 10, 10]


def test_words_counted():
    x = jnp.array([[0, 0, 5, 9_999, 10_000, 65_534, 65_535, 65_535]], jnp.uint16)

    def total(pipeline, **options):
        model = load("stackoverflow", pipeline=pipeline, **options).model
        # With weights of one every logit is the sum of the shares.
        params = jax.tree.map(jnp.ones_like, model.init(jax.random.key(0)))
        return float(model.apply(params, x)[0, 0]) - 1

    assert total("tff21") == pytest.approx(1)
    assert total("fedopt") == pytest.approx(4 / 6)
    assert total("fedopt", words_counted="known") == pytest.approx(1)
    assert total("fedopt", vocabulary=100) == pytest.approx(3 / 6)


def test_the_pipelines_of_cifar100():
    x = load("cifar100").test[0][:4]
    for pipeline, augmented, parameters in (
        ("fedopt", True, 11_227_812),
        ("tff21", False, 11_218_212),
    ):
        model = load("cifar100", pipeline=pipeline).model
        assert (model.train is not None) == augmented
        shapes = jax.eval_shape(model.init, jax.random.key(0))
        assert sum(leaf.size for leaf in jax.tree.leaves(shapes)) == parameters
        assert model.penalty is not None
    small = load("cifar100", model="cnn").model
    params = jax.eval_shape(small.init, jax.random.key(0))
    assert jax.eval_shape(small.apply, params, x).shape == (4, 100)


# What the experiments of Reddi et al. (2021) were, as the paper and its two programs have them.
PUBLISHED = {
    ("cifar100", "fedopt"): (
        {"model": "resnet18", "cohort": 10, "batch": 20, "local_work": 1, "rounds": 4000},
        {"augment": True, "affine": True, "l2": 1e-4},
    ),
    ("cifar100", "tff21"): (
        {"model": "resnet18", "cohort": 10, "batch": 20, "local_work": 1, "rounds": 4000},
        {"augment": False, "affine": False, "l2": 1e-4},
    ),
    ("emnist", "fedopt"): (
        {"model": "cnn", "cohort": 10, "batch": 20, "local_work": 1, "rounds": 1500},
        {},
    ),
    ("emnist-autoencoder", "fedopt"): (
        {"model": "autoencoder", "cohort": 10, "batch": 20, "local_work": 1, "rounds": 3000},
        {"reduction": "sum"},
    ),
    ("emnist-autoencoder", "tff21"): (
        {"model": "autoencoder", "cohort": 10, "batch": 20, "local_work": 1, "rounds": 3000},
        {"reduction": "mean"},
    ),
    ("stackoverflow", "fedopt"): (
        {"model": "logistic", "cohort": 10, "batch": 100, "local_work": 1, "rounds": 1500},
        {"reduction": "sum", "words_counted": "all", "validation": "test", "cap": 1000}
        | {"vocabulary": 10_000, "tags": 500},
    ),
    ("stackoverflow", "tff21"): (
        {"model": "logistic", "cohort": 10, "batch": 100, "local_work": 1, "rounds": 1500},
        {"reduction": "sum", "words_counted": "known", "validation": "held_out", "cap": 1000}
        | {"vocabulary": 10_000, "tags": 500},
    ),
}


@pytest.mark.parametrize(("task", "pipeline"), PUBLISHED)
def test_a_task_is_as_published(task, pipeline):
    run, options = PUBLISHED[task, pipeline]
    resolved = config.resolve({"task": task, "pipeline": pipeline, "algorithm": "fedavg"})
    assert {name: getattr(resolved, name) for name in run} == run
    assert resolved.local_unit == "epochs"
    assert resolved.options == options | {"pipeline": pipeline}


# Table 12 of Jin et al. (2022): client and server rate, local steps, fuzz factor.
TABLE_12 = {
    ("stackoverflow", "fedda-sgdm"): (100.0, 10.0, 5, None),
    ("stackoverflow", "fedda-adam"): (100.0, 1.0, 1, 1e-5),
    ("stackoverflow", "fedda-adagrad"): (100.0, 10.0, 5, 1e-5),
}


@pytest.mark.parametrize(("task", "algorithm"), TABLE_12)
def test_presets_that_were_not_tuned_are_those_of_the_paper(task, algorithm):
    client_lr, server_lr, steps, eps = TABLE_12[task, algorithm]
    resolved = config.resolve({"task": task, "algorithm": algorithm})
    chosen = resolved.chosen
    assert (chosen["client_lr"], chosen["server_lr"]) == (client_lr, server_lr)
    assert chosen.get("eps") == eps
    assert (resolved.local_work, resolved.local_unit) == (steps, "steps")
    given = config.resolve({"task": task, "algorithm": algorithm, "local_work": 7})
    assert given.local_work == 7


def seen_by_the_network(task, monkeypatch, name, **options):
    """The task's model with a network that gives back what it is given."""
    network = Model(lambda key: {"w": jnp.zeros(1)}, lambda params, x: x)
    for module in (importlib.import_module(f"fedda.tasks.{task}"), common):
        monkeypatch.setattr(module, name, lambda *args, **kwargs: network, raising=False)
    return load(task, **options)


def test_images_are_cropped_and_standardised(monkeypatch):
    problem = seen_by_the_network("cifar100", monkeypatch, "resnet18")
    x = np.asarray(problem.test[0][:5])

    def standardised(crop):
        centred = crop.astype(np.float64) - crop.mean((1, 2, 3), keepdims=True)
        least = 1 / np.sqrt(24 * 24 * 3)
        return centred / np.maximum(crop.std((1, 2, 3), keepdims=True), least)

    expected = standardised(x[:, 4:28, 4:28])
    np.testing.assert_allclose(problem.model.apply({}, x), expected, atol=1e-5)
    # In training, every image is one of the 9 x 9 crops or the mirror of one.
    trained = np.asarray(problem.model.train({}, jnp.asarray(x), jax.random.key(0)))
    for image, got in zip(x, trained, strict=True):
        crops = [image[i : i + 24, j : j + 24] for i in range(9) for j in range(9)]
        crops = np.stack(crops + [crop[:, ::-1] for crop in crops])
        assert np.abs(standardised(crops) - got).max((1, 2, 3)).min() < 1e-5


def test_characters_are_as_stored(monkeypatch):
    problem = seen_by_the_network("emnist", monkeypatch, "cnn")
    x = np.asarray(problem.test[0][:5])
    expected = (x / 255).astype(np.float32)[..., None]
    np.testing.assert_array_equal(problem.model.apply({}, jnp.asarray(x)), expected)


def test_only_images_of_ones_own_are_scaled():
    bytes_of_a_table = jnp.array([[0, 95], [1, 255]], jnp.uint8)
    np.testing.assert_array_equal(own.prepare(bytes_of_a_table), [[0, 95], [1, 255]])
    np.testing.assert_array_equal(own.prepare(jnp.full((1, 2, 2), 255, jnp.uint8)), 1)
    assert own.prepare(jnp.zeros((3, 4, 4), jnp.uint8)).shape == (3, 4, 4, 1)


@pytest.mark.parametrize("data_gb", [8.0, 0.0])
def test_classes_are_those_of_all_splits(stores, data_gb):
    """A class that the test set lacks is a class all the same, also where data stay on disk."""
    x = RNG.random((6, 2)).astype(np.float32)
    splits = {
        "train": [(name, {"x": x, "y": np.arange(6, dtype=np.int32)}) for name in "ab"],
        "test": [("a", {"x": x, "y": np.zeros(6, np.int32)})],
    }
    store.write(stores / "uneven", Source(splits), {})
    problem = load("own", data="uneven", model="linear", data_gb=data_gb)
    assert len(problem.labels) == 6
    params = problem.model.init(jax.random.key(0))
    assert problem.model.apply(params, jnp.asarray(x)).shape == (6, 6)


def test_several_targets(stores):
    x, y = RNG.random((6, 2)).astype(np.float32), RNG.random((6, 3)).astype(np.float32)
    splits = {"train": [(name, {"x": x, "y": y}) for name in "ab"]}
    store.write(stores / "targets", Source(splits | {"test": splits["train"]}), {})
    problem = load("own", data="targets", model="linear")
    assert not problem.higher_is_better
    params = problem.model.init(jax.random.key(0))
    outputs = problem.model.apply(params, jnp.asarray(x))
    expected = ((np.asarray(outputs) - y) ** 2).mean(1)
    np.testing.assert_allclose(problem.loss(outputs, jnp.asarray(y)), expected, rtol=1e-5)


def test_the_autoencoder_is_to_draw_the_ink():
    problem = load("emnist-autoencoder")
    x, y = problem.test
    assert y is x
    target = 1 - np.asarray(x[:3], np.float64).reshape(3, -1) / 255
    np.testing.assert_allclose(problem.loss(jnp.asarray(target, "float32"), y[:3]), 0, atol=1e-12)
    outputs = jnp.zeros((3, 784))
    np.testing.assert_allclose(problem.loss(outputs, y[:3]), (target**2).mean(1), rtol=1e-5)
    assert problem.reduction == "sum"
    assert load("emnist-autoencoder", pipeline="tff21").reduction == "mean"


def test_pixels_that_are_no_bytes_are_kept():
    x = np.linspace(0, 1, 5, dtype=np.float32)
    np.testing.assert_array_equal(preprocessing.scaled(jnp.asarray(x)), x)


def test_clients_drawn_anew_hold_the_same_examples():
    natural = load("emnist").shards
    for partition in ("iid", "dirichlet:0.5", "pachinko:0.1"):
        anew = load("emnist", partition=partition, clients=7).shards
        assert anew.num_clients == 7
        rows = np.asarray(anew.x)
        if partition != "pachinko:0.1":  # which leaves out what does not divide
            assert sorted(map(bytes, rows)) == sorted(map(bytes, np.asarray(natural.x)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"task": "emnist", "model": "resnet"}, "unknown model of emnist 'resnet'"),
        ({"task": "emnist", "clients": 7}, "emnist has 5 clients, got clients=7. Leave clients"),
        ({"task": "stackoverflow", "vocabulary": 70_000}, "vocabulary must be between 1 and 65533"),
        ({"task": "stackoverflow", "words_counted": "some"}, "must be known or all, got 'some'"),
        ({"task": "stackoverflow", "validation": "dev"}, "validation must be one of train, held_"),
        ({"task": "stackoverflow", "partition": "iid"}, "partition of stackoverflow must be user"),
        ({"task": "synthetic", "partition": "dirichlet:1"}, "partition of synthetic must be user"),
        ({"task": "own"}, "task own needs data=NAME"),
        ({"task": "own", "data": "stackexchange"}, "needs examples of one shape, but stackexc"),
        ({"task": "emnist", "data_gb": -1.0}, "data_gb must be at least 0"),
        ({"task": "own", "data": "yours"}, "unknown data set 'yours'. Known: "),
        ({"task": "own", "data": "mine", "model": "tree"}, "Known: cnn, linear, mlp"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        tasks.load(config.resolve(options))


def test_files_that_name_no_clients_must_be_split(stores):
    source = Source({"train": images((28, 28), 62, [50]), "test": images((28, 28), 62, [5])})
    store.write(stores / "emnist", source, {})
    with pytest.raises(InputError, match="imported from files that name no clients"):
        load("emnist")
    with pytest.raises(InputError, match=r"needs their number\. Give it, for example clients=100"):
        load("emnist", partition="iid")
    assert load("emnist", partition="iid", clients=5).shards.num_clients == 5


def test_data_that_are_not_here_are_asked_for(stores):
    shutil.rmtree(stores / "emnist")
    with pytest.raises(InputError, match="fedda data fetch emnist"):
        load("emnist")
    assert "emnist" in datasets.names()


def test_another_data_folder_has_other_data(stores, monkeypatch):
    assert load("emnist").shards.num_clients == 5
    monkeypatch.setenv("FEDDA_DATA", str(stores / "empty"))
    with pytest.raises(InputError, match="the data set emnist"):
        load("emnist")
