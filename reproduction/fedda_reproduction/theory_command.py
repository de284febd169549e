"""The command `fedda theory`."""

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from fedda.cli.terminal import err, new_directory, out, training
from fedda.errors import InputError, writing
from fedda.experiments import run
from fedda.storage.files import write_whole


@writing("--out")
def theory_command(
    problems: Annotated[int, typer.Option(help="Random problems of each family.")] = 200,
    quick: Annotated[
        bool, typer.Option("--quick", help="Few of everything, to see that it works.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="What the problems are drawn with.")] = 0,
    out_dir: Annotated[
        Path | None,
        typer.Option("--out", help="Where to write.", show_default="runs/..."),
    ] = None,
) -> None:
    """Measure what the paper's theory claims, and say what holds.

    Solves its differential equations, whole and divided among clients, on random problems and on
    the digits, in float64. Writes theory.json, figures and README.md, a page about them. On two
    cores it takes about four minutes, with fewer --problems three still, with --quick less than
    one.
    """
    from fedda_reproduction.theory import (  # late: they load Flax
        claims,
        figures,
        flows,
        measure,
        page,
        record,
    )

    if problems < 2:
        raise InputError(
            f"--problems must be at least 2, or there are no intervals, got {problems}."
        )
    for name in ("diffrax", "matplotlib", "optax"):
        flows.extra(name)
    directory = out_dir or new_directory("theory")
    if not (directory / "theory.json").exists():
        run.check_new(directory, "that of an earlier fedda theory, which is replaced.")
    directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    plan = measure.quick(problems, seed) if quick else measure.Plan(problems, seed)
    with training(lambda: "Nothing was written."):
        measured = measure.run(plan, lambda stage: err.print(f"measuring: {stage}"))
    found: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": run.device(),
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(time.process_time(), 1),
        "versions": run.versions(),
        "commit": run.commit(),
        **measured,
    }
    found["claims"] = [claim._asdict() for claim in claims.claims(found)]
    write_whole(directory / "theory.json", record.text_of(found))
    # From the file's own numbers, so that the page never says more than the file.
    found = json.loads((directory / "theory.json").read_text())
    write_whole(directory / "README.md", page.markdown(found))
    figures.draw(found, directory)
    out.print(_table(found["claims"]))
    if quick:
        out.print(page.QUICK)
    out.print(escape(f"Written to {directory} in {found['seconds']} s"), soft_wrap=True)


def _table(claims: list[dict[str, str]]) -> Table:
    listing = Table(box=box.SIMPLE_HEAD)
    listing.add_column("claim", ratio=3)
    listing.add_column("measured", ratio=4)
    listing.add_column("verdict", ratio=1)
    for claim in claims:
        listing.add_row(*(escape(claim[key]) for key in ("claim", "measured", "verdict")))
    return listing
