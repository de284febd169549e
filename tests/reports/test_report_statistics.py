"""Statistics over seeds: intervals and the rows of a table."""

import math

import numpy as np
import pytest
from scipy import stats

from fedda.reports.runs import read_runs
from fedda.reports.statistics import difference, interval, table
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
    assert text["accuracy"] == "0.8 ± 0.2"  # 4.303 * 0.1 / sqrt(3)
    assert text["rounds to 0.76"] == "20 (2 of 3)"
    assert text["MB to 0.76"] == "6 (2 of 3)"
    assert text["MB up"] == "2"


def test_the_difference_of_two_means_is_welchs():
    generator = np.random.default_rng(0)
    for counts in ((2, 2), (5, 5), (3, 40)):
        ours, theirs = (generator.normal(0.5, 0.1 * n, n).tolist() for n in counts)
        known = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
        mean, width = difference(ours, theirs)
        assert mean == pytest.approx(np.mean(ours) - np.mean(theirs))
        assert (mean - width, mean + width) == pytest.approx((known.low, known.high))
    assert difference([0.5], [0.4, 0.3]).half is None
    assert difference([0.5, 0.5], [0.5, 0.5]) == (0, 0)


def write_seeds(folder, name, finals, **settings):
    for seed, final in enumerate(finals):
        write_run(folder / f"{name}{seed}", name, seed, (0.1, 0.5, final), **settings)


def test_rows_are_sorted_and_ties_with_the_best_are_named(tmp_path):
    write_seeds(tmp_path, "worse", (0.50, 0.51, 0.52))
    write_seeds(tmp_path, "near", (0.85, 0.90, 0.95))
    write_seeds(tmp_path, "best", (0.91, 0.92, 0.93))
    write_seeds(tmp_path, "lost", (0.91, float("nan"), 0.93))
    rows = table(read_runs([tmp_path]))
    assert [(row.label, row.standing) for row in rows] == [
        *(("best", "best"), ("near", "tie"), ("worse", ""), ("lost", ""))
    ]
    assert [text["standing"] for text in cells(rows)] == ["best", "tie", "", ""]


def test_lower_may_be_better(tmp_path):
    for name, finals in {"a": (0.3, 0.31), "b": (0.1, 0.11)}.items():
        write_seeds(tmp_path, name, finals, metric="error", higher_is_better=False)
    assert [row.label for row in table(read_runs([tmp_path]))] == ["b", "a"]


def test_one_seed_ties_only_with_its_equal(tmp_path):
    for name, end in (("a", 0.9), ("b", 0.9), ("c", 0.89)):
        write_seeds(tmp_path, name, (end,))
    assert [row.standing for row in table(read_runs([tmp_path]))] == ["best", "tie", ""]


def test_rounds_to_threshold(tmp_path):
    write_run(tmp_path / "early", "a", 0, (0.1, 0.9, 0.2, 0.9))  # reached, whatever comes after
    write_run(tmp_path / "late", "a", 1, (0.1, 0.2, 0.3, 0.9))
    write_run(tmp_path / "never", "b", 0, (0.1, 0.2, 0.3, 0.4))
    a, b = table(read_runs([tmp_path]), threshold=0.9)
    assert a.rounds_to_threshold == (20.0, half((10, 30)))
    assert (b.reached, b.rounds_to_threshold) == (0, None)
    key = "rounds to 0.9"
    assert [text[key] for text in cells([a, b])] == ["20 ± 127", "never"]
    assert a.megabytes_to_threshold == (6.0, half((3, 9)))


def test_threshold_comes_from_the_best_row_in_the_direction_of_the_metric(tmp_path):
    write_run(tmp_path / "a", "a", accuracy=(1.0, 0.4), metric="error", higher_is_better=False)
    write_run(tmp_path / "b", "b", accuracy=(1.0, 0.2), metric="error", higher_is_better=False)
    b, a = table(read_runs([tmp_path]))
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
