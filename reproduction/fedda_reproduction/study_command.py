"""The command `fedda study`."""

from pathlib import Path
from typing import Annotated

import typer

from fedda.cli.terminal import Quiet, note, say, training
from fedda.errors import InputError, writing


@writing("--results")
def study_command(
    small: Annotated[
        bool, typer.Option("--small", help="Try the program: two conditions, four methods.")
    ] = False,
    folder: Annotated[
        Path | None,
        typer.Option(
            "--results", metavar="DIR", help="Where the files of the conditions are kept."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option("--time", metavar="SECONDS", help="After this time, begin nothing more."),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes. Each takes a core and up to 1 GB.")
    ] = 1,
    write: Annotated[
        bool,
        typer.Option("--write", help="Run nothing; write the pages and figures of the results."),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Run the study of reproduction/protocol.md: FedDA and its controls, tuned by one rule.

    A file for each condition holds what was run. The same command continues after an interruption.
    The full form takes hours on two cores; --small takes some minutes.
    """
    from fedda.simulate import devices
    from fedda_reproduction.study import study

    results = study.ROOT / "reproduction" / "results" / "study"
    chosen = folder or (Path("runs/study-small") if small else results)
    if write:
        from fedda_reproduction.study import page  # late: it loads what draws

        if small:
            raise InputError("--write is for the full form: leave out --small.")
        note(*page.write(chosen))
        say(f"Written to {chosen.parent / 'README.md'} and {chosen}")
        return
    devices.start_up()
    plan = study.SMALL if small else study.Plan()
    with training(lambda: "What is finished was written. The same command continues."):
        failed = study.run(plan, chosen, seconds, (lambda line: None) if quiet else note, workers)
    say(f"Written to {chosen}")
    if failed:
        raise InputError("\n".join(failed))
