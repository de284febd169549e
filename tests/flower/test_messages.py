"""Arrays and orders on the wire, and clients that do not understand them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedda import algorithms
from helpers.flower_grid import LocalGrid

pytest.importorskip("flwr")
from flwr.app import RecordDict

from fedda.flower import client_app, messages, serve
from helpers.flower_problem import (
    ROUNDS,
    TASK,
    app,
    examples,
    init,
    settings,
)

pytestmark = pytest.mark.usefixtures("x64")


def test_bfloat16_travels_bit_by_bit():
    values = {"a": jnp.asarray([1.5, -0.1, 3e38], jnp.bfloat16), "b": {"c": jnp.arange(3)}}
    record = messages.pack(values)
    assert sorted(record) == ["a", "b/c"]
    back = messages.unpack(record, jax.eval_shape(lambda: values))
    assert back["a"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(back["a"].view(np.uint16), np.asarray(values["a"]).view("uint16"))
    np.testing.assert_array_equal(back["b"]["c"], [0, 1, 2])


def test_an_order_is_what_was_sent():
    order = messages.Order("fedavg", "{}", 1, 2, 0, False, 4, 7, 6, 5, {"client_lr": 0.1})
    assert messages.Order.read(RecordDict(order.records())) == order
    with pytest.raises(
        messages.MessageError, match=r"fedda\.algorithm must be str, got None\. Server and"
    ):
        messages.Order.read(RecordDict())


def test_a_client_with_another_model_says_so(caplog):
    """It is refused in each round, and the others go on."""
    other = TASK._replace(model=TASK.model._replace(init=lambda key: init(key) | {"bias": 0.0}))
    nodes = [app(0), app(1), client_app(other, lambda _: examples(2)), app(3)]
    served = serve(LocalGrid(nodes), settings(cohort=4))
    assert served.events == {"refused_replies": ROUNDS}
    assert r"params/bias must be float64(), got float64(2,). Server and clients need" in caplog.text


def test_a_client_of_another_version_says_so(caplog):
    """The server has a hyper-parameter of which this client has not heard."""
    new = algorithms.get("fedda-sgdm")
    older = new._replace(Hyper=algorithms.get("fedavg").Hyper)
    versions = [new, new, older, new]
    nodes = [client_app(TASK, lambda _, k=k: examples(k), own) for k, own in enumerate(versions)]
    served = serve(LocalGrid(nodes), settings(new, cohort=4))
    assert served.events == {"refused_replies": ROUNDS}
    assert "unknown hyper-parameter of custom" in caplog.text
