"""Result files of wrong types: each is refused or listed by name, and none ends in a traceback."""

import contextlib
import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedda.errors import InputError
from fedda.experiments import compare
from fedda.reports import comparison, html
from fedda.reports.runs import read_runs
from fedda.simulate import train
from fedda.storage import schema
from fedda.storage.files import sealed
from fedda.tasks import config
from fedda_reproduction.paper import cells, report, tables, training, verdicts
from fedda_reproduction.paper.experiments import Entry, Experiment

TOTALS = dict.fromkeys(train.TOTALS, 0)
ROWS = [
    {"round": i, "train_loss": 1.0 if i else None, "loss": 2.0, "accuracy": 0.5, **TOTALS}
    for i in range(0, 201, 10)
]
SUMMARY = {
    "metric": "accuracy",
    "higher_is_better": True,
    "parameters": 650,
    "seconds": {"total": 2.0, "compile": 1.0},
    "device": "1 x abacus",
    "devices": 1,
    "versions": {"jax": "9.9"},
    "commit": "unknown",
    "data": {"sha256": None, "words": "digits"},
    **TOTALS,
}
THEORY = {
    "claims": [{"key": "F1 a", "claim": "b", "verdict": "confirmed", "measured": "c; d"}],
    **{"date": "2026-01-01", "device": "1 x abacus", "commit": "c", "versions": {"jax": "9.9"}},
}
BENCH = {"device": "1 x abacus", "models": {"mlp": {"fedda_to_fedavg": 1.1}}}
TUNED = {
    "algorithm": "fedavg",
    "best": {"train_loss": 0.5, "at_the_end": ["client_lr"]},
    **{"runs": 12, "rounds": 100, "seeds": [100]},
}
WRONG = [
    *(None, True, 0, -1, 10**400, 0.5, float("nan"), float("-inf"), "", "\ud800", "<b>", 9**99),
    *([], [[]], [None], {}, {"a": {}}, {"total": "x"}),
]


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every table and list of a value, with each of its keys."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def damaged(whole: Any, many: int, seed: int) -> Iterator[Any]:
    """Copies of a value, each with one part that is lost or of another type or size."""
    draw = random.Random(seed)
    yield from WRONG
    for _ in range(many):
        value = copy.deepcopy(whole)
        part, key = draw.choice(list(places(value)))
        if draw.random() < 0.2:
            del part[key]
        else:
            part[key] = draw.choice(WRONG)
        yield value


def check(path: Path, whole: Any, read: Callable[[], object], many: int = 150) -> None:
    """Damages a file in many ways: to read it fails with an `InputError` that names the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    refused = 0
    texts = [*map(json.dumps, damaged(whole, many, seed=0)), "", "{", "[" * 9999, "9" * 9999]
    for text in texts:
        path.write_text(text + "\n")
        try:
            read()
        except InputError as error:
            refused += str(path.parent) in str(error)
    path.write_text(json.dumps(whole) + "\n")
    read()
    assert refused > len(texts) / 4


def run_directory(path: Path) -> Path:
    path.mkdir()
    (path / "config.toml").write_text(config.dump(config.resolve({})))
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (path / "summary.json").write_text(json.dumps(SUMMARY))
    return path


def described(folder: Path) -> None:
    """All words and numbers of a report; not its pictures, which are slow."""
    runs = read_runs([folder])
    for template in ("comparison.md", "comparison.html"):
        html.render(template, **comparison.content(runs)).encode()


def test_the_files_of_a_run(tmp_path: Path):
    run = run_directory(tmp_path / "run")
    check(run / "summary.json", SUMMARY, lambda: described(tmp_path))
    log = run / "metrics.jsonl"

    def read() -> None:
        log.write_text(log.read_text() + json.dumps(ROWS[2]) + "\n")  # so it is not the last line
        described(tmp_path)

    check(log, ROWS[1], read)
    for wrong in ('algorithm = ["a"]', "seed = {}", "task = 1979-05-27", "seed = " + "[" * 5000):
        (run / "config.toml").write_text(wrong)
        with pytest.raises(InputError, match=r"config\.toml, which cannot be read"):
            described(tmp_path)


def test_a_finished_run_with_its_first_row_only(tmp_path: Path):
    run = run_directory(tmp_path / "run")
    (run / "metrics.jsonl").write_text(json.dumps(ROWS[0]) + "\n")
    described(tmp_path)


def test_a_run_that_becomes_a_cell(tmp_path: Path):
    run = run_directory(tmp_path / "run")

    def add() -> None:
        made = cells.add(tmp_path, *read_runs([run]))
        assert isinstance(cells.read(made), cells.Cell | cells.Damaged)

    check(run / "summary.json", SUMMARY, add)
    text = "".join(json.dumps(row) + "\n" for row in ROWS[:-1])
    for row in damaged(ROWS[-1], 50, seed=1):
        (run / "metrics.jsonl").write_text(f"{text}{json.dumps(row)}\n{json.dumps(ROWS[-1])}\n")
        with contextlib.suppress(InputError):
            add()


def test_cells(tmp_path: Path):
    """A wrong file with a right checksum and name, as another program might write it."""
    run = config.resolve({})
    one = Experiment("one", "One", (Entry("a", {}),))
    path = cells.write(tmp_path, run, ROWS, SUMMARY)
    whole = json.loads(path.read_text())
    del whole["checksum"]
    listed = 0
    for content in damaged(whole, 400, seed=0):
        path.unlink()
        if isinstance(content, dict):
            content |= {"checksum": cells._hash(content)}
            own, data = content.get("config"), content.get("data")
            if isinstance(own, dict) and isinstance(data, dict):
                identity = {"config": own, "data": data.get("sha256")}
                name = f"{own.get('algorithm')}-{cells._hash(identity)[:12]}.json"
                if name.isprintable() and "/" not in name:
                    path = path.with_name(name)
        path.write_text(json.dumps(content))
        results = cells.read_all(tmp_path)
        assert len(results.finished) + len(results.damaged) == 1
        listed += len(results.damaged)
        tables.markdown(tables.rows(one, results.finished)).encode()
        tables.markdown(tables.sources(results.finished)).encode()
        report._by_round(results.finished, "metric")
    assert listed > 200


def test_what_other_commands_wrote_beside_the_cells(tmp_path: Path):
    def read() -> None:
        verdicts.checks([], **verdicts.read_beside(tmp_path))

    check(tmp_path / "theory" / "theory.json", THEORY, read)
    check(tmp_path / "bench.json", BENCH, read, many=50)
    check(tmp_path / "tuning" / "digits" / "fedavg.json", TUNED, lambda: tables.tuning(tmp_path))


def test_comparisons(tmp_path: Path):
    text = f"[fedavg-seed0]\n{config.dump(config.resolve({'algorithm': 'fedavg'}))}"
    path = tmp_path / "comparison.toml"
    path.write_text(sealed(text))
    assert compare.written(tmp_path).keys() == {"fedavg-seed0"}
    path.write_text(sealed("a = 1"))
    with pytest.raises(InputError, match=f"{path} is damaged: 'a' is 1, expected a table"):
        compare.written(tmp_path)
    for wrong in ("a = 1", text, sealed(text).replace("seed = 0", "seed = 1", 1), "[" * 5000):
        path.write_text(wrong)
        with pytest.raises(InputError, match=f"{path} was changed or damaged"):
            compare.written(tmp_path)


def test_what_is_kept_of_unfinished_work(tmp_path: Path):
    path = tmp_path / ".work" / "together-0" / "config.toml"
    path.parent.mkdir(parents=True)
    for value in damaged(["a", "b"], 30, seed=0):
        path.write_text(f"members = {json.dumps(value)}\n")  # without its checksum
        training.tidy(tmp_path)
        assert training.begun_together(tmp_path) == {}
        assert path.exists(), "it is not deleted because it cannot be read"


def test_a_mismatch_is_told_in_words():
    spec = {"name": str, "counts": [int], "seconds?": {...: float}, "best": ({"x": int}, None)}
    whole = {"name": "a", "counts": [1], "best": None, "further": []}
    assert schema.mismatch(whole, spec) is None
    assert schema.mismatch(whole | {"seconds": {"all": 1}, "best": {"x": 1}}, spec) is None
    for change, words in (
        ({"name": 3}, "'name' is 3, expected text"),
        ({"counts": [1, True]}, "an item of 'counts' is True, expected a whole number"),
        ({"counts": None}, "'counts' is None, expected a list"),
        ({"seconds": {"all": "x"}}, "'all' is 'x', expected a number"),
        ({"best": {}}, "'best' is {}, expected a table or null"),
    ):
        assert schema.mismatch(whole | change, spec) == words
    assert schema.mismatch({"name": "a"}, spec) == "the file lacks counts, best"
