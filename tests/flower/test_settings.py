"""Settings of a federation, and configurations of a node, that are refused."""

import numpy as np
import pytest

from fedda.errors import InputError

pytest.importorskip("flwr")
from flwr.app import Context, RecordDict

from fedda.flower import Secure, serve
from fedda.flower.client import partition
from helpers.flower_problem import ROUNDS, grid, settings

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, "rounds must be a whole number of at least 1, got 0"),
        ({"cohort": 2.5}, "cohort must be a whole number of at least 1, got 2.5"),
        ({"least": 4}, "least must be at most cohort, which is 3, got 4"),
        ({"nodes": -1}, "nodes must be a whole number of at least 0, got -1"),
        ({"stabilise": -3}, "stabilise must be a share of the rounds below 1 or .*, got -3"),
        ({"stabilise": 50}, f"a whole number of rounds up to {ROUNDS}, got 50"),
        ({"deadline": 0.0}, "deadline must be a positive number of seconds, got 0.0"),
        ({"most_norm": 0.0}, "most_norm must be a positive number, or None for no limit, got 0.0"),
        ({"most_weight": np.nan}, "most_weight must be a positive number"),
        ({"most_norm_ratio": 0.5}, "most_norm_ratio must be a number of at least 1, or None"),
        ({"most_weight_ratio": 0}, "most_weight_ratio must be a number of at least 1, or None"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"algorithm": "fedada"}, "unknown algorithm 'fedada'"),
    ],
)
def test_wrong_settings_are_a_message(changes, message):
    with pytest.raises(InputError, match=message):
        serve(grid(), settings(**changes))


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
