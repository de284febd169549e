"""Trees that are made of the names of their arrays give these names again."""

import pickle
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from fedda.simulate.client_state import HostMemory
from fedda.storage.checkpoint import on_host
from fedda.storage.named_arrays import nested, steps


class State(NamedTuple):
    params: Any
    step: Any


KEPT = HostMemory({"w": np.zeros((2, 3))})
KEPT.put(np.array([4, 7]), {"w": np.ones((2, 2, 3))})

TREES = [
    State(params={"w": np.ones(2), 'it\'s "odd" [0].x': np.zeros(1)}, step=np.array(3)),
    State(params=[np.ones(2), (np.zeros(1), {"b": np.ones(3)})], step=()),
    State(params=np.ones(2), step=KEPT),
    {10: np.ones(1), 9: {"a": np.ones(2)}},
]


@pytest.mark.parametrize("tree", TREES, ids=range(len(TREES)))
def test_names_types_and_numbers_come_back(tree: Any):
    arrays = on_host(tree)
    again = nested(arrays)
    named = on_host(again)
    assert named.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(named[name], array)
    doubled = jax.tree.map(lambda leaf: 2 * leaf, again)
    assert on_host(doubled).keys() == arrays.keys(), "a tree of JAX"
    assert on_host(pickle.loads(pickle.dumps(again))).keys() == arrays.keys()


def test_attributes_are_attributes_and_keys_are_keys():
    tree = nested(on_host(TREES[1]))
    np.testing.assert_array_equal(tree.params[1][1]["b"], np.ones(3))
    with pytest.raises(AttributeError, match=r"a loaded Node\(params\) has no 'momentum'"):
        tree.momentum  # noqa: B018


def test_a_path_is_cut_into_its_steps():
    expected = [(True, "params"), (False, "a.b"), (False, 0), (True, 2), (False, "it's")]
    assert steps(""".params['a.b'][0][<flat index 2>]["it's"]""") == expected
    assert steps("[(1, 'odd')]") == [(False, "[(1, 'odd')]")]
