"""Every block of code of the documentation runs, and what its pages say of the package is so."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import fedda
from fedda import algorithms
from fedda.algorithms import registry
from fedda.tasks import config
from helpers.official_files import write_cifar100, write_emnist
from helpers.pages import NOT_RUN, PAGES, ROOT, RUN_ELSEWHERE, Block, blocks

DOCS = ROOT / "docs"
HELPERS = ROOT / "tests" / "helpers"

pytestmark = pytest.mark.usefixtures("in_quick_processes")

# The commands of the pages run with few rounds, and those that train large models with small ones.
SHORT = {
    "bench": ["--quick"],
    "compare": ["rounds=2", "eval_every=1", "model=linear"],
    "run": ["rounds=2", "eval_every=1"],
    "sweep": ["rounds=2", "eval_every=1", "model=linear"],
    "theory": ["--quick"],
}
Step = list[Any]


def command_steps(block: Block) -> list[Step]:
    steps: list[Step] = []
    for line in block.text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        elif words[:1] == ["fedda"]:
            short = [] if "--resume" in words or words[-1] == "--help" else SHORT.get(words[1], [])
            small = ["model=cnn"] if "task=cifar100" in words else []
            steps.append(["fedda", [*words[1:], *short, *small]])
        else:
            assert not words, f"the tests cannot run {line!r}: give the block a caption"
    return steps


def steps_of(page: Path) -> list[Step]:
    """Return what a page asks its reader to do, in order; refuse a block that nothing runs."""
    steps: list[Step] = []
    for block in filter(lambda block: block.is_run_here, blocks(page)):
        match block.language:
            case "python" if block.caption:
                assert re.fullmatch(r"\w+\.py", block.caption), block.caption
                steps.append(["file", block.caption, block.text])
            case "python":
                steps.append(["python", block.text])
            case "sh":
                steps += command_steps(block)
            case "toml":
                tomllib.loads(block.text)
            case "diff":
                assert page.name in ("pytorch.md", "coming_from.md"), "who checks these lines?"
            case "text":  # a drawing, or what a command prints
                assert block.caption, f"{page.name}: what is this text?"
            case other:
                raise AssertionError(f"{page.name}: nothing runs a block of {other!r}")
    return steps


def data_files(scratch: Path, server) -> list[Step]:
    """The files that the page about data reads, and a mirror that has one of them."""
    checksum = write_emnist(scratch / "archive", scratch / "made")
    server.content = (scratch / "archive").read_bytes()
    rng = np.random.default_rng(0)
    visits = {"user": [f"u{i % 12}" for i in range(96)], "a": rng.random(96), "b": rng.random(96)}
    outcome = (visits["a"] > visits["b"]).astype(int)
    pq.write_table(pa.table(visits | {"outcome": outcome}), scratch / "visits.parquet")
    write_cifar100(scratch / "cifar-100-python.tar.gz")
    mended = (
        "from dataclasses import replace\n"
        "from fedda.data.catalogue import DATASETS\n"
        "emnist = DATASETS['emnist']\n"
        f"download = (emnist.downloads[0][0], {checksum!r})\n"
        "DATASETS['emnist'] = replace(emnist, downloads=(download,))\n"
    )
    return [["python", mended]]


# The files of the page about PyTorch are a federation, in which each of its two clients runs on
# half of the nodes.
FEDERATION = """
from flwr.app import Context, RecordDict
from helpers.flower_grid import LocalGrid
import client_app, own_loop, server_app, torch

grid = LocalGrid(5 * [client_app.app] + 5 * [own_loop.app])
server_app.app(grid, Context(1, 1, {}, RecordDict(), {}))
weights = torch.load("model.pt", weights_only=True)
assert set(weights) == {"0.weight", "0.bias", "2.weight", "2.bias"}
"""
VISITS = """
from helpers import hospitals as files
files.write_csv("visits.csv")
"""
RECIPES = """
import json, pathlib
assert len(table) == 50 and list(table) == ["client", "examples", "accuracy"]
assert abs(table["accuracy"].mean() - found.mean["accuracy"]) < 1e-9
assert found.mean["accuracy"] > 0.7
assert len(pathlib.Path("hospitals.csv").read_text().splitlines()) == 51
assert json.loads(pathlib.Path("runs/mine/summary.json").read_text())["rounds"] == 1000
row = {"ward": "oncology", "sex": "F", "age": 71, "income": 2e4, "creatinine": 1.4}
row["pressure"] = None
assert (result.predict(row) == result.predict([[71, None, 1.4, 2e4, "F", "oncology"]])).all()
"""
OWN_ALGORITHM = """
import pathlib
assert pathlib.Path("look-ahead/report.html").exists()
lines = pathlib.Path("look-ahead/table.md").read_text().splitlines()
rows = [line.split("|") for line in lines if line.startswith(("| FedAvg", "| look-ahead"))]
assert [row[3].strip() for row in rows] == ["5", "5"]  # seeds
"""
BEFORE = {page: [["python", VISITS]] for page in ("README.md", "recipes.md")}
ALSO = {
    "own_algorithm.md": [["python", OWN_ALGORITHM]],
    "pytorch.md": [["python", FEDERATION]],
    "recipes.md": [["python", RECIPES]],
}

RUNNING = [page for page in PAGES if steps_of(page)]


@pytest.mark.parametrize("page", RUNNING, ids=lambda page: page.stem)
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path, request):
    """In one process, in a plain session: JAX is as strict there as it is for users."""
    steps = BEFORE.get(page.name, []) + steps_of(page) + ALSO.get(page.name, [])
    if page.name == "pytorch.md":
        pytest.importorskip("torch")
    if page.name == "pytorch_models.md" and not find_spec("torchax"):
        pytest.skip("torchax is not installed: make torch")
    if page.name in ("flower.md", "pytorch.md"):
        pytest.importorskip("flwr", reason="the extra fedda[flower] is not installed")
    for number, (kind, *parts) in enumerate(steps):
        rest = " ".join(str(step[-1]) for step in steps[number + 1 :])
        assert kind != "file" or f" {Path(parts[0]).stem}" in rest, f"nothing uses {parts[0]}"
    if ["data", "fetch", "emnist"] in [step[-1] for step in steps]:
        server = request.getfixturevalue("server")
        steps = data_files(tmp_path, server) + steps
        steps[steps.index(["fedda", ["data", "fetch", "emnist"]])][1] += [
            "--mirror", server.url.removesuffix("/file.bin"),
        ]  # fmt: skip
    paths = [str(HELPERS.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:fedda", HELPERS / "run_page.py"],
        input=json.dumps(steps),
        cwd=tmp_path,
        env=os.environ
        | {
            "FEDDA_DATA": str(tmp_path / "data"),
            "PYTHONPATH": os.pathsep.join(paths),
            "no_proxy": "*",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for reached in re.findall(r"^accuracy (0\.\d+)$", done.stdout, re.MULTILINE):
        assert float(reached) > 0.85


def test_few_blocks_are_not_run_and_each_says_why():
    found = [(page, block) for page in PAGES for block in blocks(page) if not block.is_run_here]
    assert all(len(block.caption.partition(": ")[2]) > 8 for _, block in found)
    unrun = [block for _, block in found if block.caption.startswith(NOT_RUN)]
    assert len(unrun) <= 6
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for page in {page for page, block in found if block.caption.startswith(RUN_ELSEWHERE)}:
        assert f'"{page.name}"' in tests, f"no other test reads {page.name}"


@pytest.mark.parametrize(
    "bad",
    ["```\nx\n```\n", "```ruby\nputs 1\n```\n", "```sh\nls\n```\n", "Words.\n\n    indented()\n"],
)
def test_a_block_that_nothing_runs_is_refused(tmp_path: Path, bad: str):
    page = tmp_path / "page.md"
    page.write_text(bad)
    with pytest.raises(AssertionError):
        steps_of(page)


# ------------------------------------------------------------------- what the pages say is so


def test_the_reference_has_every_public_name():
    page = (DOCS / "api.md").read_text()
    named = set(re.findall(r"^::: fedda\.(\w+)", page, re.MULTILINE))
    assert {*fedda.__all__} <= named


def test_the_page_about_data_lists_every_task():
    text = (DOCS / "own_data.md").read_text()
    for task in config.tasks():
        assert f"| `{task}` |" in text, task


def test_the_pages_name_every_extra_and_install_by_path():
    """There is no index to install from yet."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    table = (DOCS / "start.md").read_text().partition("## Install")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == extras.keys() - {"dev"}
    for path in PAGES:
        named = re.findall(r"pip install '\.\[([\w,]+)\]'", path.read_text())
        assert {extra for names in named for extra in names.split(",")} <= extras.keys(), path
        assert not re.search(r"pip install [\"']?fedda", path.read_text()), path


def test_the_pages_count_the_algorithms():
    count = len(algorithms.names())
    for page in (DOCS / "index.md", DOCS / "start.md"):
        assert f"{count} algorithms" in page.read_text() or f"all {count}" in page.read_text()
    assert set(json.loads((DOCS / "digits/runs.json").read_text())["accuracy"]) == {
        *registry.variants()
    }


def test_the_page_about_speed_quotes_the_measurements():
    page, measured = (
        path.read_text() for path in (DOCS / "speed.md", ROOT / "benchmarks/README.md")
    )
    peers = measured.partition("### EMNIST CNN")[2].partition("## Deployment")[0]
    rows = re.findall(r"^\| (\w[^|]*) \| (.* m?s) \|$", page, re.MULTILINE)
    assert len(rows) == 6
    for name, times in rows:
        found = re.findall(rf"^\| {re.escape(name)} \| ([\d.]+ m?s) \|", peers, re.MULTILINE)
        assert found == times.split(" | "), name
    for number in re.findall(r"[\d.]+ ms|\b45 s", page.partition("- **On one H200**")[2]):
        assert re.search(rf"(?<![\d.]){re.escape(number.split()[0])}(?![\d])", measured), number


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_within_the_repository_lead_somewhere(page: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if link.startswith("https://") or re.match(r"algorithms/\w+\.md", path):
            continue  # MkDocs makes the pages of the algorithms, and checks links to them
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]
