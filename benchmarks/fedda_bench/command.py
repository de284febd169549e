"""The command `fedda bench`."""

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from fedda.cli.terminal import note, print_table, say, training
from fedda.errors import InputError, unknown, writing
from fedda.storage.files import write_whole

MODELS = """Any of mlp, cnn-small, cnn, autoencoder, logistic and resnet18. Default: all of them, or
on a CPU those that take about a minute."""

SIZES = """Unequal clients, which take one epoch: lognormal:SIGMA, femnist or stackexchange.
Default: equal clients."""


@writing("--out")
def bench_command(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help=MODELS, show_default=False)
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Timings of each program.")] = 5,
    precision: Annotated[str, typer.Option(help="fp32, tf32 or bf16.")] = "tf32",
    path: Annotated[Path, typer.Option("--out", help="Output file.")] = Path("bench.json"),
    sizes: Annotated[str | None, typer.Option(help=SIZES, show_default=False)] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Time one round, as a trial.")] = False,
) -> None:
    """Time rounds of the paper's models on this machine, on random data.

    Compares FedAvg and FedDA+SGDM with centralised training on as many examples, and with the peak
    speed of the machine. Takes a few minutes on two cores, and about two with --quick, as programs
    are still compiled; mlp alone takes ten seconds with --quick.
    """
    import jax

    from fedda.simulate import devices
    from fedda.storage.provenance import commit, device, versions
    from fedda_bench import bench, cases

    devices.start_up()
    for name in models or []:
        if name not in cases.CASES:
            raise unknown("model", name, cases.CASES)
    if path.is_dir():
        raise InputError(f"--out must be a file to write, got the folder {path}.")
    with tempfile.TemporaryFile(dir=path.parent):  # so that a refusal costs no measurement
        pass
    # Else a second measurement would time the reading of a compiled program.
    jax.config.update("jax_enable_compilation_cache", False)
    default = cases.ON_CPU if jax.default_backend() == "cpu" else cases.CASES
    measured = {}
    with training(lambda: "Nothing was written."):
        peak = bench.machine_peak(precision, repetitions)
        for name in dict.fromkeys(models or default):
            note(f"measuring {name}")
            case = cases.CASES[name](precision)
            case = case if sizes is None else cases.with_sizes(case, sizes)
            case = case._replace(rounds=1) if quick else case
            measured[name] = bench.measure(case, repetitions, peak["flops_per_second"])
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "device": device(),
        "cores": devices.cores(),
        "precision": precision,
        "repetitions": repetitions,
        "quick": quick,
        "versions": versions(),
        "commit": commit(),
        "machine": peak,
        "models": measured,
    }
    write_whole(path, json.dumps(record, indent=2, allow_nan=False) + "\n")
    print_table(_table(measured))
    say(
        f"{device()}, {precision}, jax {jax.__version__}, medians of {repetitions}",
        f"at most {peak['flops_per_second'] / 1e12:.3g} TFLOP/s in a large product of matrices, "
        f"{peak['bytes_per_second'] / 1e9:.3g} GB/s in a large copy",
        f"Written to {path}",
    )


def _table(models: dict[str, Any]) -> list[list[str]]:
    """Return the header, and a line for each program under the name of its model."""
    lines = []
    for name, model in models.items():
        lines.append({"": name})
        for program, measured in model["programs"].items():
            ratio = f"{model['fedda_to_fedavg']:.2f}" if program == "fedda-sgdm" else ""
            lines.append(_cells(program, ratio, measured))
    return [list(lines[-1]), *(list(line.values()) for line in lines)]


def _cells(name: str, ratio: str, measured: dict[str, Any]) -> dict[str, str]:
    """Return a program's line of the table, by the titles of the columns."""
    seconds, speed = measured["seconds_per_round"], measured["flops_per_second"]
    planned = measured["program_bytes"]
    return {
        "": name,
        "ms a\nround": f"{1e3 * seconds['median']:.4g}",
        "spread": f"{seconds['spread'] / seconds['median']:.0%}",
        "x\nfloor": f"{measured['ratio_to_floor']:.2f}",
        "x\nFedAvg": ratio,
        "TFLOP\n/s": "-" if speed is None else f"{speed / 1e12:.3g}",
        "of\npeak": "-" if speed is None else f"{measured['share_of_peak']:.1%}",
        "com-\npile s": f"{measured['compile_seconds']:.1f}",
        "MB": "-" if planned is None else f"{planned / 1e6:,.4g}",
    }
