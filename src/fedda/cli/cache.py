"""The command `fedda cache`."""

from typing import Annotated

import typer

from fedda.cli.terminal import say


def cache_command(
    clear: Annotated[bool, typer.Option("--clear", help="Delete the programs.")] = False,
) -> None:
    """Show the size of the cache of compiled programs, or clear it.

    A program that was compiled once starts at once the next time. The cache keeps the programs
    that were used last, 1 GB at most.
    """
    from fedda.simulate import devices

    folder, count, size = devices.cached(clear)
    if folder is None:
        say(f"{devices.CACHE}=off: no programs are kept.")
    else:
        did = "Deleted" if clear else "There are"
        say(f"{did} {count:,} compiled programs ({size / 1e6:,.1f} MB) in {folder}")
