"""The command `fedda export`."""

from pathlib import Path
from typing import Annotated

import typer

from fedda.cli import terminal
from fedda.errors import InputError, writing

SUFFIXES = (".npz", ".safetensors")


@writing("FILE")
def export_command(
    source: Annotated[
        Path, typer.Argument(help="A run directory, or a file that `result.save` wrote.")
    ],
    file: Annotated[Path, typer.Argument(help="A new file: MODEL.npz or MODEL.safetensors.")],
) -> None:
    """Write the trained parameters to a file that other libraries read."""
    if file.suffix not in SUFFIXES:
        raise InputError(
            f"got {file}, expected a name that ends in {' or '.join(SUFFIXES)}. Change the name."
        )
    if file.exists():
        raise InputError(f"{file} exists already. Delete it, or give another FILE.")
    from fedda.experiments.export import export

    arrays, notes = export(source, file)
    terminal.note(*notes)
    numbers = sum(array.size for array in arrays.values())
    terminal.say(f"Written to {file}: {len(arrays)} arrays, {numbers:,} parameters")
