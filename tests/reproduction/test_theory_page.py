"""`fedda theory`: verdicts, the page with its hand-written text, and the command."""

import copy
import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from fedda.cli import main
from fedda.errors import InputError
from fedda_reproduction.theory import fits, measure, page, verdicts
from fedda_reproduction.theory.verdicts import CONFIRMED, NEARER, NOT, PARTLY, numbers

RESULTS = Path(__file__).parents[2] / "reproduction" / "results" / "theory"
FIGURES = ("deviation", "equations", "growth", "nearer", "network", "orders", "ratios")
OTHER_VERDICTS = "The text of this page was written for other verdicts"


@pytest.fixture(scope="module")
def committed():
    return json.loads((RESULTS / "theory.json").read_text())


def test_an_average_over_settings_allows_for_shared_problems():
    rng = np.random.default_rng(0)
    inside = []
    for _ in range(400):
        drawn = rng.uniform(size=50)  # the same problems in both settings
        rows = [{"share": fits.share(drawn < level)} for level in (0.6, 0.8)]
        value, low, high = verdicts.average(rows, "share")
        assert value == pytest.approx(np.mean([drawn < 0.6, drawn < 0.8]))
        inside.append(low <= 0.7 <= high)
    assert np.mean(inside) >= 0.94


def test_a_mean_is_the_same_on_every_python():
    """A sum of floats is not: since 3.12 `sum` makes up for what it rounds."""
    assert verdicts.average([{"share": [0.1, 0.1, 0.1]}] * 10, "share") == [0.1, 0.1, 0.1]


# ---- The published page


def test_the_published_page_is_that_of_its_record(committed):
    assert committed["plan"]["problems"] >= 100
    assert "network" in committed
    assert page.claims(committed) == committed["claims"]
    assert page.markdown(committed) == (RESULTS / "README.md").read_text()
    assert measure.json_text(committed) == (RESULTS / "theory.json").read_text()
    for name in FIGURES:
        assert (RESULTS / f"{name}.png").exists()
        assert f"({name}.png)" in (RESULTS / "README.md").read_text()


def test_the_text_of_the_published_page_is_true_of_its_record(committed):
    assert OTHER_VERDICTS not in page.markdown(committed)
    n = numbers(committed)
    assert max(n["over_bound"].values()) < 1, "both keep the bound"
    # FedDA's exponent is smaller at first, but it starts from a larger value.
    for row in verdicts.select(n["usual"], eta=0.01):
        assert row["decoupled exponent"][2] < row["local exponent"][1]
        assert row["ratio, T=5"] < 1
    assert n["growing"]["local"] == n["growing"]["decoupled"] == ["indefinite quadratic"]
    for row in committed["growth"]:  # FedDA's grows faster
        assert row["decoupled, equation"][1] > row["local, equation"][2]
    assert n["crossings"], "on convex losses the two cross"
    for row in verdicts.fedda_nearer(committed["deviation"]["grid"]):
        assert row["eta"] >= 0.1 or row["beta"] == 0.5, "that takes a large eta or a small beta"
    federated = committed["orders"]["logistic"]["federated"]
    for key in ("fixed time, eta", "fixed time, T - 1"):  # nearly coincide
        pair = [federated[name][key]["error"] for name in ("FedAvg", "FedDA")]
        np.testing.assert_allclose(*pair, rtol=0.05)
    assert max(row["near"] for row in n["longer"]) < 0.01, "no setting comes near"
    for row in n["longer"]:  # entries are smaller still
        assert row["quantiles"][2] < row["scale"]


def test_verdicts_follow_the_numbers(committed):
    changed = copy.deepcopy(committed)
    changed["exact"]["f1"]["logistic"]["adam"]["apart"] = 1e-3
    changed["exact"]["f2"]["cnn"] = 1e-9
    for row in changed["growth"]:
        row["local, equation"] = [row["printed"]] * 3
    changed["deviation"]["bound"][0]["local"] = 2.0
    for row in changed["deviation"]["grid"]:
        row |= {key: [0.1, 0.0, 0.2] for key in NEARER.values()}
    now, then = verdicts.verdicts(changed), verdicts.verdicts(committed)
    assert {key: (then[key], now[key]) for key in now if now[key] != then[key]} == {
        "F1": (CONFIRMED, NOT),
        "F2": (CONFIRMED, NOT),
        "F3": (NOT, PARTLY),
        "nearer": (NOT, CONFIRMED),
        "F4": (NOT, CONFIRMED),
    }
    changed["claims"] = page.claims(changed)
    text = page.markdown(changed)
    assert OTHER_VERDICTS in text
    for claim in changed["claims"]:
        assert (f"- {claim['claim']}." in text) == (now[claim["key"]] != then[claim["key"]])


def test_spans_and_lists():
    assert page.span([3, 1, 2], "t^{:.1f}") == "t^1.0 to t^3.0"
    assert page.span([1.01, 1.02], "{:.1f}") == "1.0"
    assert page.span([]) == ""
    assert page.listed("{a} of {b}", [{"a": 1, "b": 2}, {"a": 3, "b": 4}]) == "1 of 2, 3 of 4"
    assert page.listed("{} {:.1f}", {"x": 1, "y": 2}.items()) == "x 1.0, y 2.0"


# ---- The command


def fedda_command(monkeypatch, *options):
    monkeypatch.setattr(sys, "argv", ["fedda", "theory", *map(str, options)])
    try:
        main.main()
    except SystemExit as stop:
        return stop.code
    return 0


@pytest.mark.slow
def test_the_command(monkeypatch, tmp_path, capfd):
    assert fedda_command(monkeypatch, "--quick", "--out", tmp_path / "new") == 0
    assert NOT in capfd.readouterr().out
    record = json.loads((tmp_path / "new" / "theory.json").read_text())
    judged = verdicts.verdicts(record)
    assert judged["F1"] == judged["F2"] == CONFIRMED
    assert (tmp_path / "new" / "README.md").read_text() == page.markdown(record)
    for name in {*FIGURES} - {"network"}:
        assert (tmp_path / "new" / f"{name}.png").stat().st_size > 1000
    assert jnp.zeros(1).dtype == jnp.float32, "float64 must end with the command"


def test_the_files_of_a_project_are_not_replaced(monkeypatch, tmp_path, capfd):
    def measured(*_):
        raise InputError("it would be measured")

    monkeypatch.setattr(measure, "run", measured)
    (tmp_path / "README.md").write_text("# A project")
    assert fedda_command(monkeypatch, "--out", tmp_path) == 2
    assert "is not empty. Give another --out, or that of an earlier fedda theory" in " ".join(
        capfd.readouterr().err.split()
    )
    (tmp_path / "theory.json").write_text("{}")
    assert fedda_command(monkeypatch, "--out", tmp_path) == 2
    assert "it would be measured" in capfd.readouterr().err


def test_too_few_problems_are_refused(monkeypatch, tmp_path, capfd):
    assert fedda_command(monkeypatch, "--problems", 1, "--out", tmp_path) == 2
    assert "1 is not in the range x>=2" in capfd.readouterr().err
