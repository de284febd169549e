"""The command `fedda`: its commands, and what it prints when one of them fails."""

import os
import re
import sys
from importlib.metadata import entry_points
from typing import Annotated, Any

import jax
import typer
from typer.core import TyperGroup

import fedda
from fedda.cli.algorithms import algorithms_command
from fedda.cli.compare import compare_command
from fedda.cli.data import data_app
from fedda.cli.report import report_command
from fedda.cli.run import ABOUT_SETTINGS, run_command
from fedda.cli.sweep import sweep_command
from fedda.cli.terminal import at_end, out, print_error
from fedda.errors import InputError, unknown
from fedda.simulate import devices, hosts

ORDER = ("run", "compare", "report", "sweep", "algorithms", "data", "reproduce", "theory", "bench")
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED|out of memory"
ADVICE = "Lower batch, cohort, clients or chunk, or choose a smaller model."


class _Commands(TyperGroup):
    """A group that lists its commands in the order in which a user meets them."""

    def list_commands(self, ctx: Any) -> list[str]:
        found = super().list_commands(ctx)
        return sorted(found, key=lambda name: ORDER.index(name) if name in ORDER else 0)

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
app.command("algorithms")(algorithms_command)
for plugin in entry_points(group="fedda.commands"):
    app.command(plugin.name)(plugin.load())


def main() -> None:
    """Run the command. A wrong input is a message, not a traceback."""
    with hosts.parting():
        try:
            with at_end:
                app()
        except (InputError, OSError) as error:
            print_error(str(error))
            sys.exit(2)
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            reason = str(error)
            if not isinstance(error, MemoryError) and not re.search(OUT_OF_MEMORY, reason, re.I):
                raise
            print_error(f"there is not enough memory{f' ({reason})' if reason else ''}. {ADVICE}")
            sys.exit(1)
        except SystemExit as stop:
            if stop.code in (130, 143):  # JAX would wait for the rounds under way
                sys.stdout.flush()
                os._exit(stop.code)
            raise


def _print_version(asked: bool) -> None:
    if asked:
        out.print(f"fedda {fedda.__version__}")
        raise typer.Exit


Version = typer.Option(
    "--version", callback=_print_version, is_eager=True, help="Print the version."
)


@app.callback()
def start(version: Annotated[bool, Version] = False) -> None:
    """Federated optimisation: FedDA and its baselines, simulated."""
    devices.start_up()
