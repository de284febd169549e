"""Settings of a federation, and configurations of a node, that are refused."""

import numpy as np
import pytest

from fedda import algorithms
from fedda.core.losses import cross_entropy
from fedda.errors import InputError

pytest.importorskip("flwr")
from flwr.app import Context, RecordDict

from fedda.flower import Secure, serve
from fedda.flower.client import partition
from helpers.flower_problem import ROUNDS, TASK, grid, settings

pytestmark = pytest.mark.usefixtures("x64")


FEDAVG = algorithms.get("fedavg")
WRONG_STATE = FEDAVG._replace(
    phases=(FEDAVG.phases[0]._replace(merge=lambda hp, state, total: (state, state)),)
)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds must be a whole number of at least 1, got 0"),
        ({"cohort": 2.5}, "cohort must be a whole number of at least 1, got 2.5"),
        ({"least": 4}, "least must be at most cohort, which is 3, got 4"),
        ({"nodes": 2}, "cohort must be at most nodes, which is 2, got 3"),
        ({"nodes": -1}, "nodes must be a whole number of at least 0, got -1"),
        ({"stabilise": -3}, "stabilise must be a share of the rounds below 1 or .*, got -3"),
        ({"stabilise": 50}, f"a whole number of rounds up to {ROUNDS}, got 50"),
        ({"deadline": 0.0}, "deadline must be a positive number of seconds, got 0.0"),
        ({"most_norm": 0.0}, "most_norm must be a positive number, or None for no limit, got 0.0"),
        ({"most_weight": np.nan}, "most_weight must be a positive number"),
        ({"most_norm_ratio": 0.5}, "most_norm_ratio must be a number of at least 1, or None"),
        ({"most_weight_ratio": 0}, "most_weight_ratio must be a number of at least 1, or None"),
        ({"most_sum_ratio": np.nan}, "most_sum_ratio must be a number of at least 1, or None"),
        ({"most_loss_ratio": 1.5}, "most_loss_ratio needs a test set"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"algorithm": "fedada"}, "unknown algorithm 'fedada'"),
        ({"chosen": {"beta9": 1}}, "unknown .* 'beta9'"),
        ({"secure": Secure(1.0, 1.0), "cohort": 1}, "the sum over one client is its upload"),
        ({"secure": Secure(1.0, 1.0, bits=31)}, "bits of secure must be"),
        ({"task": TASK.model}, "task must be a fedda.core.task.Task, got Model"),
        (
            {"task": TASK._replace(loss=cross_entropy)},
            "y of the clients must hold the class of each example",
        ),
        ({"task": TASK._replace(loss=lambda outputs, y: 1.0)}, "one number for each example"),
        ({"example": (np.zeros((1, 4)), np.zeros((1, 2)))}, "cannot be applied to examples"),
        ({"example": np.zeros((1, 3))}, r"example must be a pair \(x, y\)"),
        ({"test": (np.zeros((5, 4)), np.zeros((5, 2)))}, r"x of the test set .* \(4,\), but"),
        ({"test": (np.zeros((5, 3)), np.zeros((4, 2)))}, "the test set has 5 rows in x but 4 in y"),
        ({"evaluate": lambda params: {"bias": params["offset"]}}, "offset"),
        ({"algorithm": algorithms.get("fedavg")._replace(phases=())}, "phases of an Algorithm"),
        ({"algorithm": WRONG_STATE}, "the last merge must return a state with the types"),
    ],
)
def test_wrong_settings_are_an_error_before_any_node_is_asked(changes, message):
    network = grid()
    kind = KeyError if "evaluate" in changes else InputError
    with pytest.raises(kind, match=message):
        serve(network, settings(**changes))
    assert not network.sent


@pytest.mark.parametrize(
    "config",
    [
        {"partition": 3},
        {"partition-id": "a"},
        {"partition-id": -1},
        {"partition-id": 2**32},
        {"partition-id": float("inf")},
    ],
)
def test_a_node_without_a_number_says_so(config):
    context = Context(1, 1, config, RecordDict(), {})
    with pytest.raises(InputError, match="must have a partition-id from 0"):
        partition(context)


def test_secure_aggregation_and_bounds_on_single_uploads_exclude_each_other():
    with pytest.raises(InputError, match="does not see"):
        serve(grid(), settings(secure=Secure(1.0, 1.0), most_norm=1.0))
