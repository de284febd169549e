"""The command `fedda theory`."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fedda.cli.terminal import new_directory, note, print_table, say, training
from fedda.errors import writing
from fedda.storage.files import check_empty, write_whole


@writing("--out")
def theory_command(
    problems: Annotated[int, typer.Option(min=2, help="Random problems per family.")] = 200,
    quick: Annotated[bool, typer.Option("--quick", help="Measure little, as a trial.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random problems.")] = 0,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Output directory.", show_default="runs/...")
    ] = None,
) -> None:
    """Check the claims of the paper's theory by numerical experiments.

    Solves its differential equations, centralised and decomposed among clients, on random problems
    and on the digits, in float64. Writes theory.json, figures and a page about them, README.md. It
    takes about four minutes on two cores, three with few --problems, and one with --quick.
    """
    from fedda.simulate import devices
    from fedda.storage.provenance import commit, device, versions
    from fedda_reproduction.theory import figures, measure, page

    devices.start_up()
    directory = out_dir or new_directory("theory")
    if not (directory / "theory.json").exists():
        advice = "Give another --out, or that of an earlier fedda theory, which is replaced."
        check_empty(directory, advice)
    directory.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    plan = measure.quick(problems, seed) if quick else measure.Plan(problems, seed)
    with training(lambda: "Nothing was written."):
        measured = measure.run(plan, lambda stage: note(f"measuring: {stage}"))
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": device(),
        "seconds": round(time.monotonic() - began, 1),
        "processor_seconds": round(time.process_time(), 1),
        "versions": versions(),
        "commit": commit(),
        **measured,
    }
    record["claims"] = page.claims(record)
    write_whole(directory / "theory.json", measure.json_text(record))
    write_whole(directory / "README.md", page.markdown(record))
    figures.draw(record, directory)
    header = ["claim", "measured", "verdict"]
    print_table([header, *([claim[key] for key in header] for claim in record["claims"])], "wwl")
    if quick:
        say("A quick run: its verdicts are of few problems, settings and rounds.")
    say(f"Written to {directory} in {record['seconds']} s")
