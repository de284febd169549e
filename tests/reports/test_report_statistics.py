"""Statistics over seeds: intervals and the rows of a table."""

import math

import numpy as np
import pytest
from scipy import stats

from fedda.reports.runs import read_runs
from fedda.reports.statistics import interval, table
from helpers.runs import cells, write_run


def test_one_run_is_its_own_numbers(tmp_path):
    write_run(tmp_path / "a", last_row={"nonfinite_clients": 4, "skipped_rounds": 1})
    (row,) = table(read_runs([tmp_path]))
    assert row.label == "fedavg"
    assert (row.seeds, row.unfinished) == (1, 0)
    assert row.final == (0.8, None)
    assert row.mean_of_last == (pytest.approx((0.5 + 0.8) / 2), None)  # round 0 is untrained
    assert row.last == 2
    assert row.threshold == round(0.95 * 0.65, 2) == 0.62
    assert row.rounds_to_threshold == (20, None)
    assert row.train_loss == (1.0, None)  # 2 / 2
    assert (row.megabytes_up.mean, row.megabytes_down.mean) == (2.0, 4.0)
    assert row.seconds == (2.0, None)  # 3, less 1 of compilation
    assert (row.nonfinite_clients, row.skipped_rounds) == (4, 1)


def half(values):
    """The half of the 95 % interval of a mean, by SciPy."""
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    return pytest.approx((high - low) / 2, rel=1e-9)


@pytest.mark.parametrize("count", [2, 3, 5, 27, 200])
def test_intervals_are_students(count):
    values = np.random.default_rng(count).normal(0.5, 0.1, count).tolist()
    assert interval(values) == (pytest.approx(np.mean(values)), half(values))


def test_intervals_of_little():
    assert interval([0.5]) == (0.5, None)
    assert interval([0.1, 0.1, 0.1]).half == 0.0  # though 0.1 + 0.1 + 0.1 is not 3 * 0.1
    assert all(map(math.isnan, interval([0.5, None])))


def test_seeds_are_averaged_with_their_interval(tmp_path):
    finals = (0.7, 0.8, 0.9)
    for seed, final in enumerate(finals):
        write_run(tmp_path / str(seed), seed=seed, accuracy=(0.1, 0.5, final))
    (row,) = table(read_runs([tmp_path]), threshold=0.76)
    assert row.seeds == 3
    assert row.final == (pytest.approx(0.8), half(finals))
    assert row.mean_of_last == (pytest.approx(0.65), half([(0.5 + final) / 2 for final in finals]))
    assert (row.reached, row.rounds_to_threshold) == (2, (20.0, 0.0))
    assert row.seconds == (3.0, half((2.0, 3.0, 4.0)))
    (text,) = cells([row])
    assert text["accuracy"] == "0.8000 ± 0.2484"  # 4.303 * 0.1 / sqrt(3)
    assert text["rounds to 0.76"] == "20 (2 of 3)"
    assert text["MB up"] == "2.000"


def test_rounds_to_threshold(tmp_path):
    write_run(tmp_path / "early", "a", 0, (0.1, 0.9, 0.2, 0.9))  # reached, whatever comes after
    write_run(tmp_path / "late", "a", 1, (0.1, 0.2, 0.3, 0.9))
    write_run(tmp_path / "never", "b", 0, (0.1, 0.2, 0.3, 0.4))
    a, b = table(read_runs([tmp_path]), threshold=0.9)
    assert a.rounds_to_threshold == (20.0, half((10, 30)))
    assert (b.reached, b.rounds_to_threshold) == (0, None)
    key = "rounds to 0.9"
    assert [text[key] for text in cells([a, b])] == ["20 ± 127.1", "never"]


def test_threshold_comes_from_the_best_row_in_the_direction_of_the_metric(tmp_path):
    write_run(tmp_path / "a", "a", accuracy=(1.0, 0.4), metric="error", higher_is_better=False)
    write_run(tmp_path / "b", "b", accuracy=(1.0, 0.2), metric="error", higher_is_better=False)
    a, b = table(read_runs([tmp_path]))
    assert a.threshold == b.threshold == 0.21  # 105 % of 0.2
    assert (a.rounds_to_threshold, b.rounds_to_threshold) == (None, (10, None))


def test_default_threshold_is_within_reach_of_a_negative_metric(tmp_path):
    write_run(tmp_path / "a", accuracy=(-9.0, -4.0), metric="log_likelihood")
    (row,) = table(read_runs([tmp_path]))
    assert row.threshold == -4.2
    assert row.reached == 1


def test_configurations_of_one_algorithm_are_told_apart(tmp_path):
    write_run(tmp_path / "a", client_lr=0.1, momentum=0.9)
    write_run(tmp_path / "b", client_lr=0.1)
    write_run(tmp_path / "c", client_lr=0.1, seed=1)
    write_run(tmp_path / "d", "fedadam", client_lr=0.5)
    rows = table(read_runs([tmp_path]))
    assert {row.label: row.seeds for row in rows} == {
        "fedadam": 1,
        "fedavg (momentum=0.9)": 1,
        "fedavg (momentum=unset)": 2,
    }


def test_a_diverged_seed_is_not_averaged_away(tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, last_row={"train_loss": None, "loss": float("inf")})
    (row,) = table(read_runs([tmp_path]))
    assert np.isnan(row.train_loss.mean)
    assert cells([row])[0]["train loss"] == "nan"


def test_unfinished_run_is_shown_and_said_to_be(tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, accuracy=(0.1, 0.4), finished=False)
    runs = read_runs([tmp_path])
    (row,) = table(runs)
    assert row.unfinished == 1
    assert row.final.mean == pytest.approx(0.6)
    assert row.seconds == (2.0, None)
    assert cells([row])[0]["seeds"] == "2 (1 unfinished)"
    assert runs[1].notes == [f"{tmp_path / 'b'}: unfinished, evaluated up to round 10 of 20"]


def test_metric_of_unfinished_runs_is_the_first_other_key(tmp_path):
    write_run(tmp_path / "a", metric="top_5", finished=False)
    (row,) = table(read_runs([tmp_path]))
    assert (row.metric, row.higher_is_better) == ("top_5", True)
    assert row.seconds is None
