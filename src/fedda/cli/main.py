"""The command `fedda`: its commands, and what it prints when one of them fails.

The modules of the commands import JAX, and all that needs it, inside of their functions. So help,
errors about settings and completion are fast.
"""

import os
import re
import signal
import sys
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fedda import __version__
from fedda.cli.algorithms import algorithms_command
from fedda.cli.cache import cache_command
from fedda.cli.compare import compare_command
from fedda.cli.data import data_app
from fedda.cli.export import export_command
from fedda.cli.report import report_command
from fedda.cli.run import ABOUT_SETTINGS, run_command
from fedda.cli.sweep import sweep_command
from fedda.cli.terminal import at_end, leaving, note, out, print_error
from fedda.errors import InputError, unknown

# Those of other packages come after these.
ORDER = ["compare", "run", "sweep", "report", "export", "algorithms", "data", "cache"]
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED|out of memory"
ADVICE = "Lower batch, cohort, clients or chunk, or choose a smaller model."


class _Commands(TyperGroup):
    """A group that lists its commands in the order in which a user meets them."""

    def list_commands(self, ctx: Any) -> list[str]:
        found = [*super().list_commands(ctx), *self._plugins()]
        return sorted(found, key=[*ORDER, *found].index)

    def get_command(self, ctx: Any, name: str) -> Any:
        if name not in self._plugins():
            return super().get_command(ctx, name)
        return _loaded(self._plugins()[name])

    def _plugins(self) -> dict[str, EntryPoint]:
        """Return the commands of other packages, which are imported when they are used."""
        return {} if self.name == "data" else _plugins()

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            raise unknown("command", args[0], self.list_commands(ctx))
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",  # which fits paragraphs to the terminal
)
app.add_typer(data_app, name="data", cls=_Commands)
# An unknown option is taken for a setting, and the error then says how settings are written.
with_settings = {"ignore_unknown_options": True}
app.command("run", context_settings=with_settings, epilog=ABOUT_SETTINGS)(run_command)
app.command("compare", context_settings=with_settings)(compare_command)
app.command("sweep", context_settings=with_settings)(sweep_command)
app.command("report")(report_command)
app.command("export")(export_command)
app.command("algorithms")(algorithms_command)
app.command("cache")(cache_command)


@cache
def _plugins() -> dict[str, EntryPoint]:
    return {plugin.name: plugin for plugin in entry_points(group="fedda.commands")}


@cache
def _loaded(plugin: EntryPoint) -> Any:
    alone = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    alone.command(plugin.name)(plugin.load())
    return typer.main.get_command(alone)


def main() -> None:
    """Run the command. A wrong input is a message, not a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell may ignore it
        usual = signal.signal(signal.SIGINT, _leave)
        leaving.callback(signal.signal, signal.SIGINT, usual)
    with leaving:
        try:
            with at_end:
                app(prog_name="fedda")  # also as `python -m fedda`, whose completion is the same
        except InputError as error:
            print_error(str(error))
            sys.exit(2)
        except OSError as error:
            where = "" if error.filename is None else f" ({error.filename})"
            print_error(f"{error.strerror or error}{where}")
            sys.exit(2)
        except Exception as error:
            if message := _mistake(error):
                print_error(message)
                sys.exit(2)
            if not _is_lack_of_memory(error):
                raise
            reason = f" ({error})" if str(error) else ""
            print_error(f"there is not enough memory{reason}. {ADVICE}")
            sys.exit(1)
        except SystemExit as stop:
            if stop.code in (130, 143):  # JAX would wait for the rounds under way
                sys.stdout.flush()
                os._exit(stop.code)
            raise


def _leave(number: int, _: object) -> None:
    """End the process. An exception could be lost: Python drops it in callbacks of imports."""
    at_end.close()
    note("Interrupted.")
    os._exit(128 + number)


def _mistake(error: Exception) -> str | None:
    """Return the place and message of an error in the file of a user's algorithm."""
    files = sys.modules.get("fedda.core.algorithm_file")  # absent: no such file was used
    return None if files is None else files.mistake(error)


def _is_lack_of_memory(error: Exception) -> bool:
    jax = sys.modules.get("jax")  # absent: it has raised nothing
    raised_by_jax = jax is not None and isinstance(error, jax.errors.JaxRuntimeError)
    found = re.search(OUT_OF_MEMORY, str(error), re.I)
    return isinstance(error, MemoryError) or (raised_by_jax and found is not None)


def _print_version(asked: bool) -> None:
    if asked:
        out.print(f"fedda {__version__}")
        raise typer.Exit


Version = typer.Option(
    "--version", callback=_print_version, is_eager=True, help="Print the version."
)


@app.callback()
def start(version: Annotated[bool, Version] = False) -> None:
    """Train one model on the data of many clients: federated learning, simulated.

    Start with `fedda compare`. Each command has `--help`.
    """
