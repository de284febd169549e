"""Heat maps of sweeps."""

import numpy as np
import pytest

from fedda.experiments import sweep
from fedda.reports import heatmap
from fedda.tasks import config

SMALL = {"algorithm": "fedda-adam", "model": "linear", "clients": 12, "cohort": 3, "rounds": 4}
RATES = {"client_lr": [0.01, 0.1, 0.3], "eps": [1e-3, 1e-2, 1e-1]}


@pytest.fixture(scope="module")
def summary(tmp_path_factory):
    return sweep.run(config.resolve(SMALL), RATES, 1, tmp_path_factory.mktemp("sweeps") / "sweep")


def test_the_map_has_every_point_in_its_place(summary, tmp_path):
    values = heatmap.table(summary, "client_lr", "eps")
    assert values.shape == (3, 3)
    assert np.isfinite(values).all()
    for point in summary["ranking"]:
        row, column = (RATES[name].index(point["hyper"][name]) for name in RATES)
        assert values[row, column] == point["train_loss"]
    failed = summary | {"ranking": [summary["ranking"][0] | {"failures": 1}]}
    assert np.isnan(heatmap.table(failed, "client_lr", "eps")).all()
    assert heatmap.write(summary, tmp_path / "map.png")
    assert heatmap.write(failed, tmp_path / "empty.png")
    assert (tmp_path / "map.png").read_bytes()[:4] == b"\x89PNG"


def test_one_axis_is_no_map(summary, tmp_path):
    one = summary | {"grid": {"client_lr": RATES["client_lr"], "eps": [1e-3]}}
    assert not heatmap.write(one, tmp_path / "map.png")
    assert not (tmp_path / "map.png").exists()
