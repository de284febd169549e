"""The page of results: tables and numbers are filled in by name, prose and verdicts are checked."""

import json
import re

import pytest

from fedda.algorithms import registry
from fedda.errors import InputError
from fedda_reproduction.paper import cells, page, tables
from fedda_reproduction.paper.experiments import experiments
from fedda_reproduction.paper.page import Filler
from helpers.finished_runs import RESULTS, entry_of, write_cell


@pytest.fixture(scope="module")
def committed():
    return Filler(RESULTS)


def test_the_committed_pages_are_filled(committed):
    """`fedda reproduce --write` would change no byte of them."""
    for path, text in committed.pages().items():
        assert path.read_text() == text, "run `fedda reproduce --write` and commit its pages"


def test_the_committed_pages_have_everything_in_its_place(committed):
    pages = committed.pages()
    for name, experiment in experiments().items():
        text = pages[RESULTS / "tables" / f"{name}.md"]
        assert text.startswith(f"# {experiment.title}\n")
        assert ("table", name) in page.PLACE.findall(text)
    index = pages[RESULTS / "tables" / "README.md"]
    for path in pages.keys() - {RESULTS / "README.md", RESULTS / "tables" / "README.md"}:
        assert f"]({path.name})" in index
    places = [place for text in pages.values() for place in page.PLACE.findall(text)]
    shown = [name for kind, name in places if kind == "table"]
    with_table = {name for name, rows in committed.tables.items() if rows}
    assert sorted(shown) == sorted(with_table | experiments().keys()), "each once"
    # A line that begins with a comment would be HTML to its end, not Markdown.
    line = re.compile(r"^\s*<!-- number.*$", re.MULTILINE)
    assert not [found for text in pages.values() for found in line.findall(text)]


@pytest.fixture
def results(tmp_path):
    """Two runs of table 3, one of them with two seeds."""
    write_cell(tmp_path, entry_of("table3", "fedavg"), (0.1, 0.5))
    for seed in (0, 1):
        write_cell(tmp_path, entry_of("table3", "fedda-sgdm"), (0.1, 0.8 + seed / 10), seed)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("runs", "3"),
        ("F6 undecided", "1"),
        ("table3/FedAvg", "0.5000"),
        ("table3/FedDA, SGDM", "0.8500"),
        ("runs uncommitted", "0"),
        ("table3/FedDA, SGDM - table3/FedAvg", "35.0"),  # 0.85 - 0.5, without an interval
        # Two equal groups: t(2) = 4.303 times their error, 0.05 * sqrt(2).
        ("table3/FedDA, SGDM - table3/FedDA, SGDM", "0.0 ± 30.4"),
    ],
)
def test_numbers_in_prose(results, name, content):
    (results / "README.md").write_text(f"a <!-- number: {name} -->old<!-- end --> b\n")
    assert page.write(results) == [results / "README.md"]
    assert (results / "README.md").read_text() == (
        f"a <!-- number: {name} -->{content}<!-- end --> b\n"
    )


def test_a_table_is_filled_and_prose_is_left_alone(results):
    (results / "README.md").write_text("Mine.\n\n<!-- table: table3 -->\nold\n<!-- end -->\n\nToo.")
    page.write(results)
    text = (results / "README.md").read_text()
    assert text.startswith(
        "Mine.\n\n<!-- table: table3 -->\n\n`fedda reproduce table3`: 2 of 20 ru"
    )
    # 0.8 and 0.9: the mean, and t(1) = 12.706 times 0.05.
    assert "| FedDA, SGDM | 0.860 | - | 0.8500 ± 0.6353 | 0.8500 ± 0.6353 | 2 | 0 | tf32 |" in text
    assert "| STEM | 0.051 | - | - | - | - | - | - |" in text
    assert text.endswith("\n\n<!-- end -->\n\nToo.")


@pytest.mark.parametrize("place", ["table: table22", "number: F99 x", "number: table3/Nobody"])
def test_an_unknown_place_is_named(results, place):
    (results / "README.md").write_text(f"<!-- {place} --><!-- end -->")
    kind, name = place.split(": ")
    with pytest.raises(InputError, match=f"asks for the {kind} '{name}', which is not known"):
        page.write(results)


def test_a_folder_without_a_page_gets_a_plain_one(results):
    assert page.write(results) == [results / "README.md"]
    text = (results / "README.md").read_text()
    assert text.startswith("# Results\n")
    assert "## Table 3: EMNIST, accuracy\n" in text
    assert "## Table 2" not in text, "nothing was run of it"
    assert "| FedAvg | 0.850 | 0.849 | 0.5000 |" in text


def test_a_page_without_places_and_an_empty_folder_are_refused(results, tmp_path):
    (results / "README.md").write_text("# A project\n")
    with pytest.raises(InputError, match=r"has no place to fill.* Move it away"):
        page.write(results)
    assert (results / "README.md").read_text() == "# A project\n"
    with pytest.raises(InputError, match=r"nothing to write about: .*cells holds no finished runs"):
        page.write(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_pages_of_tables_are_filled_beside_a_page_of_text(results):
    (results / "README.md").write_text("# Mine\n")
    (results / "tables").mkdir()
    (results / "tables" / "a.md").write_text("<!-- number: runs -->old<!-- end -->")
    assert page.write(results) == [results / "README.md", results / "tables" / "a.md"]
    assert (results / "README.md").read_text() == "# Mine\n"
    assert (results / "tables" / "a.md").read_text() == "<!-- number: runs -->3<!-- end -->"


def test_results_of_uncommitted_code_are_marked(results):
    write_cell(results, entry_of("table3", "fedlin"), (0.1, 0.5), commit="c0ffee-dirty")
    rows = tables.rows(experiments()["table3"], cells.read_all(results).finished)
    assert {row["run"]: row["seeds"] for row in rows}["FedLin"] == "1 °"
    assert {row["run"]: row["seeds"] for row in rows}["FedAvg"] == "1"


def test_a_run_of_an_earlier_version_is_not_finished_and_gives_way_to_the_new_one(
    tmp_path, monkeypatch
):
    variant, digits = registry.variants()["scaffold"], experiments()["digits"]
    assert variant.version > 1
    with monkeypatch.context() as patch:
        patch.setattr(registry, "variants", lambda: {"scaffold": variant._replace(version=1)})
        write_cell(tmp_path, entry_of("digits", "scaffold"), (0.1, 0.5))
    (old,) = cells.read_all(tmp_path).finished
    assert old.outdated
    assert tables.counted(digits, [old])[0] == 0
    assert {row["ours"] for row in tables.rows(digits, [old])} == {"-"}
    write_cell(tmp_path, entry_of("digits", "scaffold"), (0.1, 0.6))
    finished = cells.read_all(tmp_path).finished
    assert (len(finished), tables.counted(digits, finished)[0]) == (2, 1)
    shown = {row["run"]: row["ours"] for row in tables.rows(digits, finished)}
    assert shown["SCAFFOLD"] == "0.6000"


def test_names_on_the_page_are_not_markup(tmp_path):
    strange = "<script>`a|b`"
    entry = entry_of("digits", "fedavg")
    write_cell(tmp_path, entry, (0.1, 0.5), device=strange, data={"words": strange})
    (text,) = Filler(tmp_path).pages().values()
    assert text.count(r"&lt;script&gt;\`a\|b\`") == 2
    assert "<script>" not in text


def test_a_row_is_over_seeds_and_apart_by_precision(results):
    write_cell(results, entry_of("table3", "fedavg"), (0.1, 0.7), precision="bf16")
    rows = tables.rows(experiments()["table3"], cells.read_all(results).finished)
    assert [(row["ours"], row["precision"]) for row in rows if row["run"] == "FedAvg"] == [
        ("0.7000", "bf16"),
        ("0.5000", "tf32"),
    ]


def test_fedda_stands_beside_the_best_other_as_the_verdicts_count_it(tmp_path):
    for name, algorithm, end in (
        ("table3", "fedavg", 0.8),
        ("table3", "fedda-sgdm", 0.7),
        ("table3", "fedda-adam", 0.801),  # within a hundredth
        ("table3", "fedda-adagrad", None),
        ("table4", "fedavg", 0.02),
        ("table4", "fedda-sgdm", 0.01),
        ("table4", "fedda-adam", 0.03),
        ("table4", "fedda-adagrad", None),
    ):
        higher = name == "table3"
        for seed in range(3):
            ends = (0.1, end and end * (1 + (seed - 1) / 1000))
            write_cell(tmp_path, entry_of(name, algorithm), ends, seed, higher_is_better=higher)
    filler = Filler(tmp_path)
    rows = filler.tables["columns"]
    ahead, equivalent, _, behind, _ = tables.PLACES.values()
    assert [row["it is"] for row in rows] == [behind, equivalent, behind, ahead, behind, behind]
    counts = filler.checks["F6"].numbers
    assert [counts[each] for each in ("ahead", "equivalent", "undecided", "behind")] == list("1104")
    assert rows[3]["better by, 95 %"].startswith("+0.0100 ["), "a smaller error is better"
    assert (rows[1]["best other, ours"].partition(" ±")[0], rows[1]["best other, paper"]) == (
        "FedAvg 0.8000",
        "MimeLite 0.851",
    )


def test_tuning_is_shown_with_its_budget_its_best_and_its_ends(tmp_path):
    def write(task, name, best, runs=4):
        path = tmp_path / "tuning" / task / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"algorithm": name, "rounds": 7, "runs": runs, "seeds": [100, 101]}
        path.write_text(json.dumps(content | {"best": best}))

    assert tables.tuning(tmp_path) == []
    write("emnist", "fedda-sgdm", {"train_loss": 0.25, "at_the_end": ["client_lr"]})
    write("emnist", "fedavg", {"train_loss": 0.5, "at_the_end": []})
    write("emnist", "stem", None)
    write("digits", "mime-adam", {"train_loss": 1.5, "at_the_end": []}, runs=6)
    lines = tables.markdown(tables.tuning(tmp_path)).splitlines()
    assert lines[0] == "| method | Digits, 3 points x 7 rounds | EMNIST, 2 points x 7 rounds |"
    assert lines[2:] == [
        "| FedDA, SGDM | - | 0.25† (lowest) |",
        "| FedAvg | - | 0.5 |",
        "| STEM | - | not finite |",
        "| Mime, Adam | 1.5 (lowest) | - |",
    ]
    (tmp_path / "tuning" / "digits" / "mime-adam.json").write_text('{"best":')
    with pytest.raises(InputError, match=r"mime-adam\.json is not what .* Delete it, and tune"):
        tables.tuning(tmp_path)
