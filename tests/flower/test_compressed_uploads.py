"""Compressed and private federations on Flower's messages, in one process."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedda
from fedda import algorithms
from fedda.core.losses import squared_error
from fedda.core.task import Plan, Task
from fedda.errors import InputError
from fedda.transforms import compression, privacy
from helpers.flower_grid import LocalGrid

pytest.importorskip("flwr")

from fedda.flower import Secure, Settings, client_app, messages, secure_mods, serve

pytestmark = pytest.mark.usefixtures("x64")

SIZES = (4, 7, 7, 4)
PLAN = Plan(batch=3, amount=2)


def examples(client):
    rng = np.random.default_rng(client)
    return rng.normal(size=(SIZES[client], 16)), rng.normal(size=(SIZES[client], 20))


def init(key):
    return {"kernel": jnp.zeros((16, 20)), "bias": jnp.zeros(20)}


def apply(params, x):
    return x @ params["kernel"] + params["bias"][None]


TASK = Task(fedda.Model(init, apply), squared_error, PLAN)


def served(algorithm, spoil=None, mods=None, **settings):
    apps = [
        client_app(TASK, lambda _, k=k: examples(k), algorithm, mods) for k in range(len(SIZES))
    ]
    base = Settings(algorithm, TASK, examples(0), rounds=4, cohort=3, seed=3, deadline=5.0, nodes=4)
    grid = LocalGrid(apps, spoil)
    return serve(grid, base._replace(**settings)), grid


def simulated(algorithm):
    return fedda.run(
        algorithm, TASK.model, [examples(client) for client in range(len(SIZES))], squared_error,
        rounds=4, cohort=3, batch=3, local_work=2, seed=3,
    )  # fmt: skip


def assert_same(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-12), left, right)


@pytest.mark.parametrize(
    ("name", "codec"),
    [
        ("scaffold", compression.random_k(0.1)),
        ("mime-sgdm", compression.quantised(8)),
        pytest.param("fedda-sgdm", compression.top_k(0.1), marks=pytest.mark.slow),
        pytest.param("fedda-adam", compression.quantised(4), marks=pytest.mark.slow),
    ],
)
def test_compressed_federations_come_to_the_state_of_the_simulator(name, codec):
    algorithm = compression.compressed(algorithms.get(name), codec)
    found, _ = served(algorithm)
    there = simulated(algorithm)
    assert_same(found.state, there.state)
    assert not found.events
    # On the wire each array has a header; none is more than messages.MAX_HEADER.
    sent, counted = found.history[-1]["bytes_up"], there.history[-1]["bytes_up"]
    assert counted < sent < counted + 4 * 3 * 2 * 16 * messages.MAX_HEADER


def test_bounded_federations_too():
    algorithm = privacy.bounded(
        compression.compressed(algorithms.get("fedda-sgdm"), compression.top_k(0.1)), 0.5
    )
    found, _ = served(algorithm)
    assert_same(found.state, simulated(algorithm).state)


def test_noise_is_the_clients_own():
    # Nobody who knows the seed of the run can draw it again.
    algorithm = privacy.private(algorithms.get("fedavg"), 1.0, 1.0, where="local")
    one, other = (served(algorithm)[0].state for _ in range(2))
    assert not np.allclose(one.params["kernel"], other.params["kernel"])


def test_private_sums_are_secure_and_packets_are_not():
    plain = algorithms.get("fedda-sgdm")
    secure = {"secure": Secure(most=8.0, most_weight=8), "mods": secure_mods()}
    quiet = privacy.private(plain, 1.0, 0.0, 3)
    found, _ = served(quiet, **secure)
    for a, b in zip(
        jax.tree.leaves(found.state), jax.tree.leaves(simulated(quiet).state), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-3)
    with pytest.raises(InputError, match="opened one by one"):
        served(compression.compressed(plain, compression.top_k(0.1)), **secure)
