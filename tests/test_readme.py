"""What the README says of the digits and of the algorithms is so."""

import re

from fedda import algorithms
from fedda.algorithms import registry
from helpers.pages import ROOT

README = (ROOT / "README.md").read_text()


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
