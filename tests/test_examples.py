"""The README and the examples are programs, and they run."""

import io
import os
import pickle
import re
import subprocess
import sys
import tarfile
import tomllib
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from fedda import algorithms
from fedda.algorithms import registry
from fedda.cli import main
from fedda.data.catalogue import DATASETS
from fedda.tasks import config
from helpers.archives import tar_bz2

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


pytestmark = pytest.mark.usefixtures("in_quick_processes")


def run_plainly(code: str, cwd: Path) -> str:
    """No strictness here: an example must run in a plain session, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:fedda", "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_example(path: Path, tmp_path: Path):
    printed = run_plainly(path.read_text(), tmp_path)
    assert printed.strip()
    assert len(path.read_text().splitlines()) <= 70, "an example is short"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_page_about_uploads(tmp_path: Path):
    text = (ROOT / "docs" / "uploads.md").read_text()
    wrapped, accounted = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    sizes = [float(size) for size in re.findall(r"([0-9.]+) MB up", run_plainly(wrapped, tmp_path))]
    assert len(sizes) == 6
    assert max(sizes[1:4]) < 0.4 * sizes[0], "coded uploads are smaller"
    poisson, fixed = re.findall(r"epsilon ([0-9.]+)", run_plainly(accounted, tmp_path))
    assert float(poisson) < float(fixed)


def test_readme_python_blocks(tmp_path: Path):
    assert blocks("python")
    for section in README.split("\n## "):  # whose blocks are one session
        run_plainly("\n".join(re.findall(r"```python\n(.*?)```", section, re.DOTALL)), tmp_path)
    own = next(block for block in blocks("python") if "fedda.Model(" in block)
    assert len([line for line in own.splitlines() if line.strip()]) <= 10, "in ten lines"


def test_readme_a_kept_run_continues(tmp_path: Path):
    """Interrupted at round 200 and called again, it ends as it would have at once."""
    own, kept = (
        next(block for block in blocks("python") if word in block)
        for word in ("fedda.Model(", "directory=")
    )
    shown = "\nprint([row['round'] for row in result.history], result.params['w'].ravel().tolist())"
    whole = run_plainly(own + kept.replace('"runs/mine"', "None") + shown, tmp_path)
    assert whole.splitlines()[-1].startswith("[0, 10, ")
    assert ", 490, 500]" in whole
    interrupted = """
def stop(row):
    if row["round"] == 200:
        sys.exit()
"""
    stopping = kept.replace('directory="runs/mine"', 'directory="runs/mine", on_evaluation=stop')
    assert "500" not in run_plainly("import sys\n" + own + interrupted + stopping + shown, tmp_path)
    assert not (tmp_path / "runs/mine/summary.json").exists()
    for _ in range(2):
        again = run_plainly(own + kept + shown, tmp_path)
        assert again.splitlines()[-1] == whole.splitlines()[-1]


@pytest.mark.slow
def test_a_queue_of_results_as_contributors_fill_it(tmp_path: Path):
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (commands,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    lines = [f"digits --only {each}" for each in ("fedavg", "fedda-sgdm", "fedavg --seeds 2")]
    (tmp_path / "queue.txt").write_text("".join(f"{line}\n" for line in lines))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", commands],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "reproduction/results/cells/digits").glob("*.json"))) == 3
    assert "2 of 25 runs" in (tmp_path / "reproduction/results/README.md").read_text()


DATA_COMMANDS = next(block for block in blocks("sh") if "fedda data fetch" in block).splitlines()


def test_readme_commands_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every `fedda ...` line runs, in a short form; every `make` target exists."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    makefile = (ROOT / "Makefile").read_text()
    monkeypatch.chdir(tmp_path)
    ran = 0
    for line in lines:
        words = line.split("#")[0].split()
        if words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
        if words[:1] == ["fedda"] and line not in DATA_COMMANDS:
            if words[1] in ("run", "compare", "sweep") and "--resume" not in words:
                words += ["rounds=2", "eval_every=1", "model=linear", "--quiet"]
            words += {"bench": ["mlp", "--quick"], "theory": ["--quick"]}.get(words[1], [])
            monkeypatch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as stop:
                main.main()
            assert not stop.value.code, line
            ran += 1
    assert ran >= 5


def test_readme_data_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server):
    """Every line of the section about data, on small files in the official layouts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("no_proxy", "*")
    made = tmp_path / "made"
    made.mkdir()
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        with h5py.File(made / f"fed_emnist_{split}.h5", "w") as file:
            for writer in range(12):
                pixels = rng.integers(0, 256, (5, 28, 28)) / 255
                file[f"examples/f{writer:04}_00/pixels"] = pixels.astype(np.float32)
                file[f"examples/f{writer:04}_00/label"] = rng.integers(0, 62, 5).astype(np.int32)
    files = {path.name: path.read_bytes() for path in made.iterdir()}
    checksum = tar_bz2(tmp_path / "archive", files)
    server.content = (tmp_path / "archive").read_bytes()
    emnist = DATASETS["emnist"]
    assert emnist.downloads, "what the README fetches can be fetched"
    mirror = server.url.removesuffix("/file.bin")
    download = (emnist.downloads[0][0], checksum)
    monkeypatch.setitem(DATASETS, "emnist", replace(emnist, downloads=(download,)))
    with tarfile.open("cifar-100-python.tar.gz", "w:gz") as archive:
        for split, size in (("train", 600), ("test", 200)):
            fine = np.arange(size) % 100
            table = {
                b"data": rng.integers(0, 256, (size, 3072)).astype(np.uint8),
                b"fine_labels": fine.tolist(),
                b"coarse_labels": (fine // 5).tolist(),
            }
            content = pickle.dumps(table, protocol=2)
            member = tarfile.TarInfo(f"cifar-100-python/{split}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    visits = {"user": [f"u{i % 12}" for i in range(96)], "a": rng.random(96), "b": rng.random(96)}
    outcome = (visits["a"] > visits["b"]).astype(int)
    pq.write_table(pa.table(visits | {"outcome": outcome}), "visits.parquet")
    for line in DATA_COMMANDS:
        words = line.split("#")[0].split()
        if words[1] == "run":
            words += ["rounds=2", "eval_every=1", "--quiet"]
            words += ["model=cnn"] if "task=cifar100" in words else []
        if words[2] == "fetch":
            words += ["--mirror", mirror]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as stop:
            main.main()
        assert not stop.value.code, line


def test_readme_lists_every_task():
    for task in config.tasks():
        assert f"| `{task}` |" in README or task == "digits", task


def test_readme_table_is_the_committed_one():
    """The table is copied from the file that `fedda compare` wrote, not typed."""
    table = (ROOT / "docs" / "digits" / "table.md").read_text().split("\n\n")[0]
    assert table.strip() in README


def test_readme_says_what_the_table_does():
    """Rounds to 0.92, and what was sent by then, in megabytes both ways."""
    text = " ".join(README.split())
    header, _, *lines = (ROOT / "docs" / "digits" / "table.md").read_text().splitlines()[:7]
    columns = [name.strip() for name in header.split("|")]
    rounds, sent = {}, {}
    for line in lines:
        row = dict(
            zip(columns, (cell.strip().split(" ")[0] for cell in line.split("|")), strict=True)
        )
        rounds[row["algorithm"]] = int(row["rounds to 0.92"])
        both = float(row["MB up"]) + float(row["MB down"])
        sent[row["algorithm"]] = round(both * rounds[row["algorithm"]] / 200)
        assert abs(float(row["accuracy"]) - 0.97) < 0.005, "all end near 0.97"
    adagrad, adam, sgdm, fedavg = (
        f"{rounds[name]}" for name in ("fedda-adagrad", "fedda-adam", "fedda-sgdm", "fedavg")
    )
    told = (
        f"after {adagrad} (AdaGrad), {adam} (Adam) and {sgdm} rounds (SGDM), FedAvg after {fedavg}"
    )
    assert told in text
    adagrad, adam, sgdm = (f"{sent[f'fedda-{name}']}" for name in ("adagrad", "adam", "sgdm"))
    told = f"FedDA {adagrad} (AdaGrad), {adam} (Adam) and {sgdm} (SGDM)"
    assert f"FedAvg needs {sent['fedavg']}, FedProx {sent['fedprox']}, {told}" in text


def test_readme_says_who_ends_highest_on_the_digits():
    """In the table of all methods, which `fedda reproduce` writes."""
    page = (ROOT / "reproduction" / "results" / "README.md").read_text()
    section = page.partition("## Handwritten digits")[2].partition("\n## ")[0]
    found = dict(re.findall(r"^\| ([^|]+) \| ([0-9.]+) ±", section, re.MULTILINE))
    assert len(found) == len(algorithms.names())
    assert max(found, key=lambda name: float(found[name])) == "FedOpt, Yogi"


def test_readme_names_every_method():
    text = " ".join(README.split())
    for variant in registry.variants().values():
        assert re.match(r"\w+", variant.label)[0] in text
    count = len(algorithms.names())
    assert f"{count} algorithms" in text
    assert f"lists all {count}" in text
    assert f"--all` has all {count}" in text


def test_readme_names_every_extra_and_installs_by_path():
    """There is no index to install from yet."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    table = README.partition("## Install")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == extras.keys() - {"dev"}
    for path in PAGES:
        named = re.findall(r"pip install '\.\[([\w,]+)\]'", path.read_text())
        assert {extra for names in named for extra in names.split(",")} <= extras.keys(), path
        assert not re.search(r"pip install [\"']?fedda", path.read_text()), path


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_within_the_repository_lead_somewhere(page: Path):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings]


# The packages that the examples of some modules need.
OPTIONAL = {
    "fedda.flower": "flwr",
    "fedda.models.equinox": "equinox",
    "fedda.torch": "torch",
    "fedda.transforms.privacy": "dp_accounting",
}


def test_the_examples_of_docstrings_are_right(tmp_path: Path):
    """In one process: importing JAX takes longer than most examples."""
    paths = [path for path in (ROOT / "src").rglob("*.py") if ">>>" in path.read_text()]
    names = [".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in paths]
    absent = [name for name, package in OPTIONAL.items() if find_spec(package) is None]
    modules = sorted(name.removesuffix(".__init__") for name in names)
    modules = [name for name in modules if not name.startswith(tuple(absent))]
    code = f"""
import doctest, importlib
for name in {modules}:
    failed, attempted = doctest.testmod(importlib.import_module(name))
    print(f"{{name}}: {{attempted}} attempted, {{failed}} failed")
"""
    printed = run_plainly(code, tmp_path)
    assert len(re.findall(": [1-9][0-9]* attempted, 0 failed", printed)) == len(modules), printed
