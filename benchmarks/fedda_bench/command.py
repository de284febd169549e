"""The command `fedda bench`."""

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from fedda.cli.terminal import err, out, print_whole, training
from fedda.errors import InputError, unknown, writing
from fedda.experiments import run
from fedda.simulate import devices
from fedda.storage.files import write_whole


@writing("--out")
def bench_command(
    models: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]...",
            help="Of mlp, cnn-small, cnn, autoencoder, logistic, resnet18. Default: all, or on a "
            "CPU those that take about a minute.",
            show_default=False,
        ),
    ] = None,
    repetitions: Annotated[int, typer.Option(help="Timings of each program.")] = 5,
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16.")] = "tf32",
    path: Annotated[Path, typer.Option("--out", help="The file to write.")] = Path("bench.json"),
    quick: Annotated[
        bool, typer.Option("--quick", help="One round each, to see that it works.")
    ] = False,
) -> None:
    """Measure rounds of the paper's models on this machine, on drawn data.

    FedAvg and FedDA+SGDM are compared with centralised training on as many examples, and with the
    most that the machine can do. On two cores this takes a few minutes, with --quick about two as
    programs are still compiled; mlp alone takes ten seconds with it.
    """
    from fedda_bench import bench, cases, machine  # late: they load Flax

    names = list(dict.fromkeys(models or []))
    for name in names:
        if name not in cases.CASES:
            raise unknown("model", name, cases.CASES)
    if repetitions < 1:
        raise InputError(f"--repetitions must be at least 1, got {repetitions}.")
    if not path.parent.is_dir():
        raise InputError(f"--out is in {path.parent}, which is not a folder. Make it first.")
    if path.is_dir():
        raise InputError(f"--out must be a file to write, got the folder {path}.")
    _check_writable(path)
    # Or a second measurement would tell how long it takes to read a program.
    jax.config.update("jax_enable_compilation_cache", False)
    if not names:
        cpu = jax.default_backend() == "cpu"
        names = [name for name in cases.CASES if not cpu or name in cases.ON_CPU]
    with training(lambda: "Nothing was written."):
        found = {}
        for name in names:
            err.print(f"measuring {name}")
            case = cases.build(name, precision)
            found[name] = bench.measure(case._replace(rounds=1) if quick else case, repetitions)
        most = machine.most(precision, repetitions, quick)
    measured: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "device": run.device(),
        "cores": devices.cores(),
        "precision": precision,
        "repetitions": repetitions,
        "quick": quick,
        "versions": run.versions(),
        "commit": run.commit(),
        "machine": most,
        "models": {name: bench.with_shares(each, most) for name, each in found.items()},
    }
    write_whole(path, json.dumps(measured, indent=2, allow_nan=False) + "\n")
    print_whole(_table(measured["models"]))
    for line in _remarks(measured):
        out.print(escape(line), soft_wrap=True)
    out.print(f"Written to {path}", soft_wrap=True)


def _check_writable(path: Path) -> None:
    """Tries it: permissions do not tell what a file system refuses."""
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write to {path} ({error.strerror}). Give another --out."
        ) from None


COLUMNS = (
    "ms a\nround",
    "least",
    "spread",
    "x\nfloor",
    "x\nFedAvg",
    "1,000\nex./s",
    "TFLOP\n/s",
    "of\npeak",
    "com-\npile s",
    "MB",
)


def _table(models: dict[str, Any]) -> Table:
    """A line for each program, under the name of its model."""
    listing = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    listing.add_column("", no_wrap=True)
    for title in COLUMNS:
        listing.add_column(title, justify="right")
    for name, model in models.items():
        listing.add_row(f"[bold]{name}[/]")
        for trained, one in model["programs"].items():
            seconds, speed, planned = (
                one[key] for key in ("seconds_per_round", "flops_per_second", "program_bytes")
            )
            listing.add_row(
                trained,
                f"{1e3 * seconds['median']:.4g}",
                f"{1e3 * seconds['min']:.4g}",
                f"{seconds['spread'] / seconds['median']:.0%}",
                f"{one['ratio_to_floor']:.2f}",
                f"{model['fedda_to_fedavg']:.2f}" if trained == "fedda-sgdm" else "",
                f"{one['examples_per_second'] / 1e3:,.4g}",
                "-" if speed is None else f"{speed / 1e12:.3g}",
                "-" if speed is None else f"{one['share_of_peak']:.1%}",
                f"{one['compile_seconds']:.1f}",
                "-" if planned is None else f"{planned / 1e6:,.4g}",
            )
    return listing


def _remarks(measured: dict[str, Any]) -> list[str]:
    most, models = measured["machine"], measured["models"]
    peaks = list(models.values())[-1]["peak_bytes_so_far"].items()
    memory = ", ".join(f"{size / 1e9:.1f} GB {where}" for where, size in peaks if size is not None)
    return [
        f"{measured['device']}, {measured['precision']}, jax {measured['versions']['jax']}, "
        f"medians of {measured['repetitions']}",
        f"at most {most['flops_per_second'] / 1e12:.3g} TFLOP/s in a large product of matrices, "
        f"{most['bytes_per_second'] / 1e9:.3g} GB/s in a large copy",
        f"largest memory of all models: {memory}",
    ]
