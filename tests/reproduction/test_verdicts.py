"""Verdicts follow from cells: made-up cells whose verdict is known."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from fedda.errors import InputError
from fedda.report.tables import markdown_text
from fedda_reproduction.paper import cells, evidence, experiments, tables, verdicts
from fedda_reproduction.paper.cells import Cell, Cells
from fedda_reproduction.paper.verdicts import Beside


def cell(entry, values, every=None, seed=0, **content):
    """A finished run whose metric took these values, at equal distances up to the last round."""
    config = tables.resolved(entry, None, seed=seed)
    every = every or config.rounds // len(values)
    rounds = list(range(config.rounds - every * (len(values) - 1), config.rounds + 1, every))
    history = {"round": rounds, "accuracy": list(values)}
    usual = {
        "metric": "accuracy",
        "date": "2027-01-01T00:00:00Z",
        "higher_is_better": config.task != "emnist-autoencoder",
        "history": history,
        "data": {},
        "nonfinite_clients": 0,
        "skipped_rounds": 0,
        "parameters": 1000,
        "bytes_down": 0,
        "bytes_up": 0,
        "seconds": {"total": 1.0, "compile": 0.5},
    }
    return Cell(Path("x.json"), config, usual | content)


def told(name, found, theory=None, bench=None):
    every = verdicts.verdicts(Cells(found, []), Beside(theory, bench))
    return next(one for one in every if one.name == name)


def table(name, value):
    """All runs of a table; `value(algorithm)` is what each came to."""
    entries = experiments.experiments()[name].entries
    return [cell(entry, [value(entry.algorithm)]) for entry in entries]


def entry_of(name, algorithm):
    return next(
        each for each in experiments.experiments()[name].entries if each.algorithm == algorithm
    )


def test_there_is_one_verdict_for_each_claim_and_nothing_is_settled_without_runs():
    found = verdicts.verdicts(Cells([], []), Beside())
    assert [one.name for one in found] == [f"F{number}" for number in range(1, 15)]
    assert {one.verdict for one in found} == {"not settled"}


@pytest.mark.parametrize(
    ("best_elsewhere", "verdict"),
    [
        ((), "holds"),
        (("table2",), "holds in part"),
        (("table2", "table3", "table4"), "does not hold"),
    ],
)
def test_best_in_every_column(best_elsewhere, verdict):
    found = []
    for name in ("table2", "table3", "table4"):
        better = 0.1 if name == "table4" else 0.9  # of the autoencoder, less is better
        ours, theirs = (0.5, better) if name in best_elsewhere else (better, 0.5)
        found += table(name, lambda each, a=ours, b=theirs: a if each.startswith("fedda") else b)
    assert told("F6", found).verdict == verdict


LOSING = {"fedda-sgdm": 0.4, "fedavg": 0.5}


def test_one_lost_column_is_enough():
    alone = [cell(entry_of("table2", each), [end]) for each, end in LOSING.items()]
    assert told("F6", alone).verdict == "does not hold"
    ahead = [*alone, cell(entry_of("table2", "fedda-adam"), [0.6])]
    assert told("F6", ahead).verdict == "holds in part"


def test_a_missing_run_leaves_a_column_open_and_a_diverged_rival_is_no_rival():
    everything = table("table5", lambda each: 0.5 if each.startswith("fedda") else 0.4)
    assert told("F7", everything).verdict == "holds"
    missing = [one for one in everything if one.config.algorithm != "fedlin"]
    assert told("F7", missing).verdict == "holds so far"
    assert "0.4 (1 not run)" in told("F7", missing).measured
    better = [*missing, cell(entry_of("table5", "fedlin"), [0.6])]
    assert told("F7", better).verdict == "does not hold"
    assert "SGDM 0.5 behind FedLin's 0.6" in told("F7", better).measured
    diverged = [
        one
        if one.config.algorithm != "stem"
        else dataclasses.replace(
            one, content=one.content | {"history": {"round": [4000], "accuracy": [None]}}
        )
        for one in everything
    ]
    assert "STEM" not in told("F7", diverged).measured
    assert told("F7", diverged).verdict == "holds"


def test_the_paper_contradicts_itself_on_stack_overflow():
    found = table("table5", lambda each: {"fedda-adam": 0.6, "fedopt-adagrad": 0.7}.get(each, 0.3))
    verdict = told("F7", found)
    assert verdict.verdict == "holds in part", "best with Adam alone"
    assert "Of 3 columns FedDA is in 1 ahead of all that were run, in 1 level" in verdict.told
    assert "CLIMB 0.302" in verdict.measured


def test_what_cannot_be_told_apart_is_neither_won_nor_lost():
    """One seed: a hundredth of what they come to. Several: the interval of their differences."""
    own, other = (entry_of("table2", name) for name in ("fedda-sgdm", "fedavg"))
    for ours, theirs, order in (
        ([0.5], [0.496], 0), ([0.5], [0.49], 1), ([0.49], [0.5], -1), ([None], [0.5], -1),
        ([None], [None], 0), ([0.5, 0.51, 0.52], [0.495, 0.505, 0.516], 1),
        ([0.5, 0.51, 0.52], [0.4, 0.6, 0.5], 0),
    ):  # fmt: skip
        of = [
            [cell(entry, [value], seed=seed) for seed, value in enumerate(values)]
            for entry, values in ((own, ours), (other, theirs))
        ]
        assert evidence.order(*of) == order, (ours, theirs)
    assert evidence.order([cell(own, [0.5])], [cell(other, [0.1], seed=1)]) == 0, "no shared seed"
    level = told("F6", [cell(own, [0.5]), cell(other, [0.499])])
    assert (level.verdict, "level with FedAvg's 0.499" in level.measured) == ("not settled", True)


def test_a_fedda_that_failed_is_behind_even_where_less_is_better():
    ends = {"fedda-sgdm": None, "fedavg": 0.5}
    found = [cell(entry_of("table4", name), [end]) for name, end in ends.items()]
    assert told("F6", found).verdict == "does not hold"
    assert "SGDM failed, behind FedAvg's 0.5" in told("F6", found).measured


def test_runs_of_another_precision_are_not_more_seeds():
    """Those of the most seeds count, and no seed counts twice."""
    entry = entry_of("tuned-emnist", "fedavg")
    exact = [cell(entry, [0.8], seed=seed) for seed in range(3)]
    coarse = [
        dataclasses.replace(one, config=dataclasses.replace(one.config, precision="bf16"))
        for one in exact[:2]
    ]
    assert evidence.runs("tuned-emnist", [*coarse, *exact]) == {"fedavg": exact}
    elsewhere = [
        dataclasses.replace(one, content=one.content | {"data": {"sha256": "x"}}) for one in exact
    ]
    assert evidence.pairs(exact, elsewhere) == []


def test_rounds_that_are_saved():
    """Thresholds are crossed on straight lines between evaluations."""
    entry = entry_of("table3", "fedda-sgdm")
    one, two = cell(entry, [0.5, 0.76, 0.84, 0.9]), cell(entry, [0.8, 0.8, 0.8, 0.8])
    assert [evidence.reached(one, goal) for goal in (0.4, 0.5, 0.8, 0.87, 0.95)] == [
        375, 375, pytest.approx(750 + 375 / 2), pytest.approx(1125 + 375 / 2), math.inf,
    ]  # fmt: skip
    assert evidence.saved(two, one, 0.8) == pytest.approx(1 - 375 / 937.5)
    assert evidence.saved(two, one, 0.9) == 0, "who never arrives does so at the end"
    at = 1125 + 375 * (0.95 * 0.9 - 0.84) / 0.06
    assert evidence.saved(two, one) == pytest.approx(1 - 375 / at)


def test_who_fails_is_no_rival_in_speed():
    """FedDA is there at once, of 1,500 rounds 375; others at the end; one ends with nothing."""
    values = {"fedlin": [0.99, 0.99, 0.99, 0.01]}
    found = []
    for name in ("table2", "table3", "table5"):
        for each in experiments.experiments()[name].entries:
            usual = [0.99] * 4 if each.algorithm.startswith("fedda") else [0.1, 0.1, 0.1, 0.99]
            found.append(cell(each, values.get(each.algorithm, usual)))
    verdict = told("F5", found)
    assert verdict.verdict == "holds in part", "under 75 % on Stack Exchange, where 75.4 % is asked"
    assert verdict.measured.count("24 pairs of runs") == 3, "eight rivals in three columns"
    # To 0.75 of 0.1 to 0.99: 1125 + 375 * 0.65 / 0.89 rounds, and so on to 0.84; FedDA has 375.
    saved = np.mean([1 - 1 / (3 + (goal - 0.1) / 0.89) for goal in (0.75, 0.8, 0.82, 0.84)])
    assert f"{100 * saved:.1f} % (EMNIST)" in verdict.told
    assert f"EMNIST SGDM {100 * saved:.0f} %, Adam" in verdict.measured
    failed = [
        cell(each, [0.01] * 4 if each.algorithm.startswith("fedda") else [0.99] * 4)
        for each in experiments.experiments()["table3"].entries
    ]
    assert told("F5", failed).verdict == "does not hold"
    assert "to 0.95 of its own end 0.0 %" in told("F5", failed).measured


@pytest.mark.parametrize(
    ("paper", "ours"),
    [
        ([0.1, 0.2, 0.3, 0.4], [0.1, 0.2, 0.3, 0.4]),
        ([0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.3, 0.2]),
        ([0.055, 0.055, 0.055, 0.868], [0.1, 0.3, 0.2, 0.9]),
    ],
)
def test_pairs_in_the_papers_order_are_kendalls(paper, ours):
    agree, pairs = evidence.alike(paper, ours)
    untied = sum(a != b for i, a in enumerate(paper) for b in paper[:i])
    assert pairs == untied
    # tau-b = (agree - disagree) / sqrt(pairs untied in x * pairs untied in y)
    expected = stats.kendalltau(paper, ours).statistic * math.sqrt(untied * 6)
    assert 2 * agree - pairs == pytest.approx(expected)


@pytest.mark.parametrize(("sign", "verdict"), [(1, "holds"), (-1, "does not hold")])
def test_sensitivity_is_judged_by_ranks(sign, verdict):
    found, seen = [], set()
    for number in range(6, 12):
        for entry in experiments.experiments()[f"table{number}"].entries:
            key = str(sorted(entry.values.items()))
            if entry.task != "stackexchange" and key not in seen:
                seen.add(key)
                found.append(cell(entry, [0.5 + sign * entry.paper / 4]))
    assert told("F10", found).verdict == verdict


def test_runs_that_all_failed_have_no_order():
    entries = [
        each for each in experiments.experiments()["table6"].entries if each.task == "emnist"
    ]
    found = [cell(entry, [entry.paper / 10]) for entry in entries]
    assert "table 6 EMNIST 0 of 6" in told("F10", found).measured
    assert told("F10", found).told.startswith("0 of 6 pairs")
    assert told("F10", found).verdict == "does not hold"


def figure5(*work):
    return [
        entry
        for entry in experiments.experiments()["figure5"].entries
        if entry.task != "stackexchange" and entry.values["local_work"] in work
    ]


def test_local_iterations_and_momentum():
    found = [
        cell(entry, [{1: 0.5, 2: 0.6, 5: 0.8, 10: 0.7, 20: 0.1}[entry.values["local_work"]]])
        for entry in figure5(1, 2, 5, 10, 20)
    ]
    assert told("F8", found).verdict == "holds"
    assert "EMNIST SGDM 0.5, 0.8 (T = 5), 0.1" in told("F8", found).measured
    of_one_task = [one for one in found if one.config.task == "emnist"]
    assert told("F8", of_one_task).verdict == "holds so far"
    other_seed = cell(entry_of("figure5", "fedda-sgdm"), [0.99], seed=1)
    assert told("F8", [*found, other_seed]) == told("F8", found), "no other T has that seed"
    calm = [one for one in found if one.config.local_work < 20]
    calm += [cell(entry, [0.7]) for entry in figure5(20)]
    assert told("F8", calm).verdict == "holds in part", "it rises, and does not collapse"
    assert "best in 6 of 6 series, and accuracy collapses" in told("F8", calm).told
    assert "in 0 of the 2 in which it should" in told("F8", calm).told
    found = [
        cell(entry, [0.6 if entry.values["beta1"] else 0.7])
        for entry in experiments.experiments()["ablation"].entries
        if "beta1" in entry.values
    ]
    assert told("F12", found).verdict == "does not hold"
    assert "EMNIST SGDM -0.1 to none, +0 to restarted" in told("F12", found).measured
    assert "in 0 of 6 comparisons" in told("F12", found).told


@pytest.mark.parametrize(("local", "verdict"), [(0.5, "holds so far"), (0.65, "holds in part")])
def test_momentum_must_help_in_the_same_seed_and_more_than_local_momentum(local, verdict):
    def value(entry):
        if entry.algorithm.startswith("mfl"):
            return local
        return 0.6 if entry.values["beta1"] else 0.4

    entries = [one for one in experiments.experiments()["ablation"].entries if one.task == "emnist"]
    found = [cell(entry, [value(entry)]) for entry in entries]
    # Another seed is far worse, but without momentum it was not run.
    found += [cell(one, [0.1], seed=1) for one in entries if one.label.endswith("beta1 0.9")]
    assert told("F12", found).verdict == verdict


def test_stabilisation_is_judged_by_the_spread_of_the_last_rounds():
    """Of the full-batch rounds, which are 75 of 1,500: of ten evaluations the last eight."""
    found = []
    for entry in experiments.experiments()["stabilise"].entries:
        if entry.task == "emnist":
            end = [0.8] * 8 if entry.values["stabilise"] else [0.5, 0.6] * 4
            found.append(cell(entry, [0.1, 0.1, *end], every=10))
            if not entry.values["stabilise"]:  # a calm run, but of a seed that the others lack
                found.insert(0, cell(entry, [0.5] * 10, every=10, seed=1))
    verdict = told("F11", found)
    assert verdict.verdict == "holds so far"
    assert "in 3 of 3 comparisons, and ends higher in 3;" in verdict.told
    # The mean of ten: (2 * 0.1 + 8 * 0.8) / 10 against (2 * 0.1 + 8 * 0.55) / 10.
    assert "EMNIST SGDM, 5 % 0 (without 0.05; its mean +0.2)" in verdict.measured


def test_cost_is_counted_in_models():
    entries = experiments.experiments()["table3"].entries
    wanted = [
        one for one in entries if one.algorithm.startswith("fedda") or one.algorithm == "fedavg"
    ]

    def of(entry):
        models = 2 if entry.algorithm.startswith("fedda") else 1
        sent = 4 * 1000 * 10 * 1500 * models
        return cell(entry, [0.5], parameters=1000, bytes_down=sent, bytes_up=sent)

    def of_bench(ratio):
        return {"device": "x", "models": {"cnn": {"fedda_to_fedavg": ratio}}}

    found = [of(entry) for entry in wanted]
    verdict = told("F14", found, bench=of_bench(1.1))
    assert verdict.verdict == "holds"
    assert "2 models down and 2 up" in verdict.told
    assert "cnn 1.10" in verdict.told
    assert told("F14", found, bench=of_bench(1.6)).verdict == "holds in part"
    assert told("F14", found).verdict == "not settled"
    assert told("F14", [], bench=of_bench(1.1)).verdict == "not settled"


def test_the_margin_of_tuned_methods_is_over_pairs_of_seeds():
    entries = {
        entry.algorithm: entry for entry in experiments.experiments()["tuned-emnist"].entries
    }
    values = {
        "fedda-sgdm": (0.80, 0.82, 0.81),
        "fedda-adam": (0.7, 0.7, 0.7),
        "fedavg": (0.81, 0.84, 0.84),
        "scaffold": (0.9, None, 0.9),  # diverged once: not the best
    }
    found = [
        cell(entries[name], [value], seed=seed)
        for name, own in values.items()
        for seed, value in enumerate(own)
    ]
    # Differences -0.01, -0.02, -0.03: mean -0.02, deviation 0.01, so ± t(2) * 0.01 / sqrt(3).
    half = stats.t.ppf(0.975, 2) * 0.01 / math.sqrt(3)
    words = f"against the best other, FedAvg 0.83: SGDM -0.02 ± {half:.2g}, Adam -0.13"
    assert words in told("F6", found).measured
    entries = {
        each.algorithm: each for each in experiments.experiments()["recommended-emnist"].entries
    }
    ours, control = entries["fedda-sgdm"], entries["fedopt-sgdm"]
    found += [cell(ours, [value], seed=seed) for seed, value in enumerate((0.9, 0.92, 0.91))]
    alone = f"full-batch rounds: against the best other, FedAvg 0.83: SGDM +0.08 ± {half:.2g}."
    assert told("F6", found).measured.endswith(alone)
    found += [cell(control, [value], seed=seed) for seed, value in enumerate((0.9, 0.93, 0.93))]
    too = f"do too: against the best other, FedOpt, SGDM 0.92: SGDM -0.01 ± {half:.2g}."
    assert told("F6", found).measured.endswith(f"{alone[:-1]}; if others {too}")


def test_stack_exchange_is_told_with_its_controls():
    """Full-batch rounds for all, and rates that the grid has not."""

    def cells_of(name, values):
        entries = {each.label: each for each in experiments.experiments()[name].entries}
        return [cell(entries[label], [value]) for label, value in values.items()]

    found = cells_of("table5", {"FedDA, Adam": 0.6, "FedOpt, Adam": 0.5})
    tuned = "(18 not run): against the best other, FedOpt, Adam 0.5: Adam +0.1"
    assert f"Stack Exchange {tuned}. Its own" in told("F7", found).measured
    found += cells_of(
        "recommended-stackexchange", {"FedDA, Adam": 0.65, "FedOpt, Adam": 0.45, "FedAvg": 0.7}
    )
    assert (
        f"{tuned}; if FedDA alone ends with full-batch rounds: against the best other, FedOpt, "
        "Adam 0.5: Adam +0.15; if others do too: against the best other, FedAvg 0.7: Adam -0.05."
    ) in told("F7", found).measured
    found += cells_of("table5-rates", {"FedOpt, Adam, server_lr 1": 0.8})
    other = "With other rates of the grid: FedOpt, Adam, server_lr 1 0.8. Its own"
    assert other in told("F7", found).measured


@pytest.mark.parametrize(
    ("parts", "verdict"),
    [
        (["holds"], "holds"),
        (["holds", "does not hold"], "holds in part"),
        (["does not hold", "does not hold"], "does not hold"),
        (["holds in part", "does not hold"], "holds in part"),
    ],
)
def test_what_theory_found_is_taken_over(parts, verdict):
    claims = [
        {"key": f"F3 {i}", "claim": f"c{i}", "verdict": part, "measured": f"x{i}"}
        for i, part in enumerate(parts)
    ]
    found = told("F3", [], {"claims": claims})
    assert found.verdict == verdict
    if len(parts) == 1:
        assert (found.told, found.measured) == ("X0.", "")
    else:
        assert all(f"“c{i}”" in found.told for i in range(len(parts)))
        assert found.measured == "c0: x0. c1: x1."


@pytest.mark.parametrize(
    ("name", "command"), [("theory/theory.json", "theory"), ("bench.json", "bench")]
)
@pytest.mark.parametrize(
    "text",
    [
        '{"claims": [',
        "[]",
        "3",
        "{}",
        '{"claims": 3, "models": 3, "device": "d"}',
        '{"claims": [{}], "models": {"cnn": 3}, "device": "d"}',
        '{"claims": [3], "models": {"cnn": {"fedda_to_fedavg": "1"}}, "device": "d"}',
        '{"claims": [{"key": 3, "claim": "", "verdict": "", "measured": ""}], "models": {}}',
    ],
)
def test_a_damaged_file_beside_the_cells_is_named(tmp_path, name, command, text):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=f"{name} is not what fedda {command} writes.* Delete it"):
        verdicts.read_beside(tmp_path)


def test_every_claim_has_one_sentence_and_its_numbers():
    """Of the committed results: a table to read, and under it what each sentence is made of."""
    folder = Path(__file__).parents[2] / "reproduction" / "results"
    results, beside = cells.read_all(folder), verdicts.read_beside(folder)
    found = verdicts.verdicts(results, beside)
    text = verdicts.section(results, beside)
    assert [each.name for each in found] == [f"F{number}" for number in range(1, 15)]
    for each in found:
        assert (
            f"| {each.name} | {each.claim} | {each.verdict} | {markdown_text(each.told)} |" in text
        )
        assert not each.measured or f"\n- **{each.name}** {markdown_text(each.measured)}" in text
        assert any(character.isdigit() for character in each.told + each.measured)


def test_a_claim_is_not_that_of_a_longer_number():
    claims = [{"key": "F13", "claim": "c", "verdict": "holds", "measured": "x"}]
    assert told("F1", [], {"claims": claims}).verdict == "not settled"
    assert told("F13", [], {"claims": claims}).verdict == "holds"
