"""One of ten nodes multiplies its update by 100, in a real federation with the default settings.

The example app is changed in two places: node 3 lies from a round of the run configuration on, and
a run may switch the limits of the server off. A message takes a process of its own, so that all
runs together take some thousand seconds of one core.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra fedda[flower] is not installed")

from helpers.federation import EXAMPLE, example, summary

NODES, ROUNDS, LIAR = 10, 10, "client 3"
LAST = 3  # rounds whose mean accuracy is compared: from round to round it moves by a point
CLIENT = '''
from flwr.app import Array, ArrayRecord


def boost(message, context, call_next):
    """Multiply the upload of node 3 by 100, from the round `boost_from` on."""
    reply = call_next(message, context)
    number = message.content.config_records.get("fedda", {}).get("round", -1)
    if context.node_config["partition-id"] == 3 and number >= context.run_config["boost_from"]:
        changed = {
            name: array if name == "weight" else Array((100 * array.numpy()).astype("float32"))
            for name, array in reply.content["upload"].items()
        }
        reply.content["upload"] = ArrayRecord(changed)
    return reply


app = client_app(TASK, data, mods=[boost])
'''
SERVER = """
def limits(given):
    names = () if given["limits"] else ("most_norm_ratio", "most_sum_ratio", "most_weight_ratio")
    return dict.fromkeys(names)


@app.main()"""


def replaced(path: Path, *pairs: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in pairs:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path.write_text(text)


def changed_app(folder: Path) -> Path:
    app = Path(shutil.copytree(EXAMPLE, folder / "app"))
    replaced(app / "flower_digits/client_app.py", ("app = client_app(TASK, data)", CLIENT))
    replaced(
        app / "flower_digits/server_app.py",
        ("@app.main()", SERVER.strip()),
        ("            directory=", "            **limits(given),\n            directory="),
    )
    replaced(
        app / "pyproject.toml", ("deadline =", f"boost_from = {ROUNDS}\nlimits = true\ndeadline =")
    )
    return app


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Any]:
    with example.Federation(tmp_path / "federation", NODES, changed_app(tmp_path)) as running:
        yield running


@pytest.mark.slow
def test_boosting_does_not_replace_the_model(federation: Any, tmp_path: Path):
    """From the start, and from half-time: within two points of the undisturbed run.

    Without limits, the same lies bring the accuracy down to that of guessing.
    """
    settings = "client_lr=0.3 server_lr=0.5 eps=0.1"
    common = {"algorithm": "fedda-adam", "settings": settings, "nodes": NODES, "cohort": NODES}
    common["deadline"] = 900.0
    found = {}

    def train(name: str, rounds: int, **config: Any) -> float:
        directory = tmp_path / name
        federation.run(common | {"rounds": rounds, "out": str(directory)} | config, within=5000)
        rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        accuracy = fmean(row["accuracy"] for row in rows[-LAST:])
        found[name] = summary(directory)["events_by_client"]
        reached = [round(row["accuracy"], 3) for row in rows]
        print(name, rounds, reached, f"{accuracy:.3f}", found[name], flush=True)
        return accuracy

    start = train("start", ROUNDS, boost_from=0)
    assert train("undefended", LAST, boost_from=0, limits=False) < 0.3
    train("undisturbed", ROUNDS // 2)
    shutil.copytree(tmp_path / "undisturbed", tmp_path / "half-time")
    half_time = train("half-time", ROUNDS, boost_from=ROUNDS // 2)
    undisturbed = train("undisturbed", ROUNDS)
    assert min(start, half_time) > undisturbed - 0.02
    for name, rounds in (("half-time", ROUNDS // 2), ("start", ROUNDS)):
        (named,) = (key for key in found[name] if key.startswith(LIAR))
        assert found[name][named] == {"refused_replies": rounds}
