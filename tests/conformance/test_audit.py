"""The audit's verdicts follow from the committed results, and the pages from the verdicts."""

import numpy as np
import pytest

from benchmarks.peers.environments import REQUIREMENTS
from conformance.audit import report
from conformance.audit.adapter import ROUNDS
from conformance.audit.compare import ROUNDING, UNEXPLAINED, error, expected, judge, states
from conformance.audit.trials import LIBRARIES, TRIALS
from conformance.generate import formatted
from conformance.reader import read_problem

RESULTS = report.read_results()
ROWS = report.judged(RESULTS)
WITH_READING = [trial for trial in TRIALS if trial.reading is not None]


def name_of(trial):
    return f"{trial.library}: {trial.name}"


def models_of(rounds):
    return [np.array(state["params"]) for state in rounds]


def models_of_reading(trial):
    return models_of(states(trial, trial.reading.reference, trial.reading.options))


def trial_named(library, name):
    (found,) = (each for each in TRIALS if (each.library, each.name) == (library, name))
    return found


# ---- the committed results


def test_the_pages_are_those_of_the_results():
    for page, table in (
        (report.README, report.long_table(RESULTS)),
        (report.TRUST, report.short_table(RESULTS)),
    ):
        assert report.with_table(page.read_text(), table) == page.read_text(), page
    assert report.RESULTS.read_text() == formatted(RESULTS) + "\n"


def test_every_trial_has_a_result_that_is_explained():
    assert [row.trial for row in ROWS if row.found.verdict == UNEXPLAINED] == []
    for library, result in RESULTS["libraries"].items():
        assert set(result["trials"]) == {each.name for each in TRIALS if each.library == library}
    assert len(LIBRARIES) >= 4
    assert len({trial.algorithm for trial in TRIALS}) >= 5


def test_the_versions_are_those_that_are_installed():
    for name, library in LIBRARIES.items():
        wanted = REQUIREMENTS[library.environment][0]
        assert wanted.partition("==")[2] == RESULTS["libraries"][name]["version"]


def test_every_difference_has_a_note():
    for trial in WITH_READING:
        assert trial.note, name_of(trial)


# ---- the comparer


@pytest.mark.parametrize("trial", TRIALS, ids=name_of)
def test_the_vector_is_equal(trial):
    found = judge(trial, models_of(expected(trial)), "float64")
    assert (found.verdict, found.first) == ("equal", None)


@pytest.mark.parametrize("trial", WITH_READING, ids=name_of)
def test_a_reading_is_far_from_the_vector_and_recognised(trial):
    models = models_of_reading(trial)
    assert error(models, models_of(expected(trial))) > 1e-2
    found = judge(trial, models, "float64")
    assert found.verdict == trial.reading.verdict
    assert (found.error, found.first.round) == (0, 1)


@pytest.mark.parametrize("trial", TRIALS, ids=name_of)
def test_other_numbers_are_unexplained(trial):
    models = models_of(expected(trial)) if trial.reading is None else models_of_reading(trial)
    models[2] = models[2] + 1e-5
    assert judge(trial, models, "float64").verdict == UNEXPLAINED


def test_a_difference_is_named_by_round_and_quantity():
    sign = trial_named("pfl", "SCAFFOLD II")
    found = judge(sign, models_of_reading(sign), "float32")
    assert (found.first.round, found.first.quantity) == (1, "control")
    plain = trial_named("flower", "FedAvg")
    models = models_of(expected(plain))
    models[3] = models[3] + 0.5
    found = judge(plain, models, "float64")
    assert (found.first.round, found.first.quantity) == (4, "params")
    assert found.distance == 0  # that is the model of round 5


def test_rounding_depends_on_the_type():
    trial = trial_named("pfl", "FedAvg")
    models = [model + 5e-7 for model in models_of(expected(trial))]
    assert judge(trial, models, "float32").verdict == "equal"
    assert judge(trial, models, "float64").verdict == UNEXPLAINED
    assert {result["dtype"] for each in RESULTS["libraries"].values()
            for result in each["trials"].values()} == set(ROUNDING)  # fmt: skip


# ---- what the adapters are given


def test_the_adapters_are_given_the_batches_of_the_vectors():
    problem = read_problem()
    for cohort, visits in zip(ROUNDS, problem.visits("epochs"), strict=True):
        assert list(cohort) == [visit.client for visit in visits]
        for visit in visits:
            rows = cohort[visit.client]
            assert len(rows.x) == 2 * visit.examples
            for (x, y), batch in zip(rows.batches(), visit.batches, strict=True):
                np.testing.assert_array_equal(x, batch.x)
                np.testing.assert_array_equal(y, batch.y)
