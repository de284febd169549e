"""Means over clients in every type of parameters and for every layout: nothing may saturate.

All clients have the same update, 1, so their weighted mean is 1, whatever their weights. In
bfloat16 256 + 1 is 256, and a weight of 257 is 256; in float16 a sum above 65,504 is infinite.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedda
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients

CLIENTS = 600
SIZES = [1, 2, 257]  # examples of a client, in turn; all of a client's are alike


def rising(outputs, y):
    """A loss whose gradient is -1."""
    return -outputs


def model(dtype):
    def apply(w, x):
        return x[:, 0].astype(dtype) * w

    return fedda.Model(lambda key: jnp.zeros((), dtype), apply)


FEDERATION = [(np.ones((SIZES[i % 3], 1)), np.zeros(SIZES[i % 3])) for i in range(CLIENTS)]


@pytest.fixture(params=["bfloat16", "float16", "float32", "float64"])
def dtype(request):
    with jax.enable_x64(request.param == "float64"), jax.numpy_dtype_promotion("standard"):
        yield jnp.dtype(request.param)


def assert_is_one(value, dtype, terms=0):
    """To the precision of the parameters, and that of a sum of so many rounded terms."""
    assert value.dtype == dtype
    rounding = terms * float(jnp.finfo(jnp.result_type(float)).eps)
    assert abs(float(value) - 1) <= float(jnp.finfo(dtype).eps) + rounding


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("chunk", [1, 10, CLIENTS])
def test_the_mean_of_equal_updates_is_that_update(dtype, chunk, devices):
    result = fedda.run(
        "fedavg", model(dtype), from_clients(FEDERATION), rising, rounds=1, cohort=CLIENTS,
        batch=1, local_work=1, client_lr=1.0, chunk=chunk, devices=devices,
    )  # fmt: skip
    assert_is_one(result.params, dtype)


def test_momenta_and_control_variates_are_means_too(dtype):
    """FedDA: P = S = m for beta1 = 0. SCAFFOLD: the mean of the c_i is the gradient, -1."""
    settings = {"cohort": CLIENTS, "batch": 1, "local_work": 1, "rounds": 1, "client_lr": 1.0}
    found = fedda.run("fedda-sgdm", model(dtype), FEDERATION, rising, beta1=0.0, **settings)
    assert_is_one(found.params, dtype)
    assert_is_one(-found.state.momentum, dtype)
    found = fedda.run("scaffold", model(dtype), FEDERATION, rising, **settings)
    mean_weight = sum(SIZES) / len(SIZES)
    # Each client divides its part by the number of clients, which is rounded.
    assert_is_one(-found.state.control / jnp.asarray(mean_weight, dtype), dtype, terms=CLIENTS)


def test_the_gradient_of_many_parts(dtype):
    """All of a client's examples, 600 parts of one: their sum in bfloat16 would be 256."""
    x = np.ones((CLIENTS, 1))
    task = Task(model(dtype), rising, Plan(batch=1), reduction="sum")
    shard = from_clients([(x, np.zeros(CLIENTS))]).shard(0)
    gradient = jax.jit(task.full_gradient)(jnp.zeros((), dtype), shard, jax.random.key(0))
    assert_is_one(-gradient, dtype)


def test_a_federation_on_flower(dtype):
    pytest.importorskip("flwr")
    from fedda.flower import Settings, client_app, serve
    from helpers.flower_grid import LocalGrid

    task = Task(model(dtype), rising, Plan(batch=1))
    apps = [client_app(task, lambda _, pair=pair: pair) for pair in FEDERATION[:3]]
    grid = LocalGrid([apps[i % 3] for i in range(300)])
    chosen = {"client_lr": 1.0}
    served = serve(grid, Settings("fedavg", task, FEDERATION[0], 1, 300, chosen, nodes=300))
    assert_is_one(served.state.params, dtype)
