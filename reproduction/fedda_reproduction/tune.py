"""Chooses a task's presets by the FedDA paper's rule, with one budget for every algorithm.

    python benchmarks/tune.py emnist --precision bf16
    python benchmarks/tune.py emnist --only fedda-sgdm,fedavg
    python benchmarks/tune.py emnist --choose

The rule: of every grid the point with the lowest training loss, averaged over the last rounds and
over the seeds. The test set is not looked at. Every algorithm has as many points, and the same
seeds, which are not those of `fedda compare` and `fedda reproduce`. What every point came to is
written to reproduction/results/tuning/<task>/<algorithm>.json, which is not trained again.
When
all are, src/fedda/presets/<task>-<model>.toml is made of them; --choose only does that.
"""

import argparse
import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fedda import algorithms
from fedda.errors import unknown
from fedda.experiments import sweep
from fedda.simulate import devices
from fedda.storage.files import write_whole
from fedda.tasks import config
from fedda_reproduction.paper import methods
from fedda_reproduction.paper.training import with_memory

RESULTS = Path("reproduction/results/tuning")

# Rates of the paper's grid. Families of algorithms with the same settings share a grid.
RATES = [0.01, 0.03, 0.1, 0.3, 1.0, 3.3]
PLAIN = {"client_lr": RATES, "server_lr": [0.1, 0.3, 1.0, 3.3, 10.0, 33.0]}
CLIENT_ONLY = [0.001, 0.003, *RATES, 10.0, 33.0, 100.0, 333.0]
SMALL = [1e-3, 1e-2, 1e-1]
Grid = dict[str, list[float]]


def digits_grid(name: str) -> Grid:
    """36 points: the rates, and one more setting where there is one to adapt."""
    fields = algorithms.get(name).Hyper._fields
    if "server_lr" not in fields:  # stem, mfl
        third = {"a": [0.03, 0.1, 0.3], "gamma": [0.5, 0.8, 0.9], "eps": SMALL}
        return {"client_lr": CLIENT_ONLY} | {k: v for k, v in third.items() if k in fields}
    if name == "fedprox":
        return {"client_lr": RATES[1:5], "server_lr": [1.0, 3.3, 10.0], "mu": SMALL}
    if name.startswith("fedda") and "eps" in fields:
        return {"client_lr": RATES[1:5], "server_lr": [0.1, 1.0, 10.0], "eps": SMALL}
    if "tau" in fields:  # fedopt
        return {"client_lr": RATES[1:5], "server_lr": [0.01, 0.1, 1.0], "tau": SMALL}
    if "eps" in fields and name != "climb":  # adaptive on the client
        return {"client_lr": [0.003, *RATES[:3]], "server_lr": [0.3, 1.0, 3.3], "eps": SMALL}
    return PLAIN


def powers(centre: float, *exponents: float) -> list[float]:
    return [float(f"{centre * 10**each:.3g}") for each in exponents]


def autoencoder_grid(name: str) -> Grid:
    """24 points: losses summed over a batch want large rates, unless a step is normalised."""
    fields = algorithms.get(name).Hyper._fields
    thirds = {
        "eps": [1e-3, 1e-2],  # first: methods with eps have a beta1, too
        "beta1": [0.9, 0.99],
        "beta": [0.5, 0.9],
        "gamma": [0.5, 0.9],
    }
    third = next({key: values} for key, values in thirds.items() if key in fields)
    adapts = "eps" in fields
    if "server_lr" not in fields:  # mfl
        centre = -2.75 if adapts else 0.0
        return {"client_lr": powers(10**centre, *(k / 4 for k in range(-5, 7)))} | third
    if name.startswith("fedda") and adapts:
        return {"client_lr": [3.16, 10.0, 31.6], "server_lr": [0.00316, 0.01, 0.0316, 0.1]} | third
    rates = [0.001, 0.00316, 0.01, 0.0316] if adapts else [1.0, 3.16, 10.0, 31.6]
    return {"client_lr": rates, "server_lr": [0.316, 1.0, 3.16]} | third


def text_grid(name: str) -> Grid:
    """12 points: losses divided by 500 tags want large rates, unless a step is normalised."""
    fields = algorithms.get(name).Hyper._fields
    adapts = ("eps" in fields or "tau" in fields) and name != "climb"
    if "server_lr" not in fields:  # mfl, stem
        return {"client_lr": powers(0.1 if adapts else 100.0, *(k / 4 for k in range(-5, 7)))}
    if not adapts or name.startswith(("fedda", "fedopt")):  # which adapt on the server alone
        return {"client_lr": [100.0, 333.0, 1000.0], "server_lr": [0.3, 1.0, 3.3, 10.0]}
    return {"client_lr": [0.03, 0.1, 0.3, 1.0], "server_lr": [0.3, 1.0, 3.3]}


class Around(NamedTuple):
    """How far a grid goes from the published rates, in powers of ten."""

    alone: tuple[float, ...]  # client rates where there are no others,
    pair: tuple[tuple[float, ...], tuple[float, ...]]  # with server rates,
    trio: tuple[float, ...]  # with those and a third setting,
    quartet: tuple[float, ...]  # and a fourth


HALF = (-0.5, 0, 0.5)  # server rates beside other settings
WIDE = Around(  # 24 points
    alone=tuple(k / 4 for k in range(-5, 7)),
    pair=((-1, -0.5, -0.25, 0, 0.25, 0.5), (-0.5, 0, 0.5, 1)),
    trio=(-0.5, 0, 0.5, 1),
    quartet=(-0.25, 0.25),
)
NARROW = Around(  # 12 points
    alone=tuple(k / 2 for k in range(-2, 4)),
    pair=((-1, -0.5, 0, 0.5), HALF),
    trio=(0, 0.5),
    quartet=(0,),
)


def grid_around(task: str, around: Around) -> Callable[[str], Grid]:
    """Grids around the rates that the methods have in the paper's table of this task."""

    def grid(name: str) -> Grid:
        own = config.resolve({"task": task, "algorithm": name} | methods.settings(task)[name])
        rate, is_fedda = own.chosen["client_lr"], name.startswith("fedda")
        others = {
            # FedDA's momentum forgets in a local step what others forget in a round: of ten steps
            # 0.99 leaves 0.9, and 0.9 leaves 0.35.
            "beta1": [0.9, 0.99] if is_fedda else [0.5, 0.9],
            "beta": [0.5, 0.9],
            "gamma": [0.5, 0.9],
            "a": [0.1, 0.3],
        }
        fuzz = {"tau": (0, 1), "eps": (-1, 0) if is_fedda else (0, 1)}
        third = {k: powers(own.chosen[k], *v) for k, v in fuzz.items() if k in own.chosen}
        if name == "climb":
            third = {}
        if is_fedda or not third:
            third = {k: v for k, v in others.items() if k in own.chosen} | third
        if "server_lr" not in own.chosen:
            return {"client_lr": powers(rate, *around.alone)} | third
        moves = own.chosen["server_lr"]
        if not third:
            client, server = around.pair
            return {"client_lr": powers(rate, *client), "server_lr": powers(moves, *server)}
        rates = powers(rate, *(around.quartet if len(third) > 1 else around.trio))
        return {"client_lr": rates, "server_lr": powers(moves, *HALF)} | third

    return grid


class Study(NamedTuple):
    rounds: int
    seeds: tuple[int, ...]  # one after the other
    grid_of: Callable[[str], Grid]
    algorithms: tuple[str, ...] = ()  # all, if none is named
    run: Mapping[str, Any] = {}  # what is not the task's default
    fixed: Mapping[str, Any] = {}  # settings, for the algorithms that have them
    together: int | None = None  # points at a time; as many as fit, if it is not said


OF_THE_PAPER = tuple(methods.settings("emnist"))
# Everyone does one epoch, also FedDA, for which the paper has numbers of steps.
IMAGES = {"pipeline": "fedopt", "local_work": 1, "local_unit": "epochs"}
STUDIES = {
    "digits": Study(200, (100, 101), digits_grid),
    "emnist": Study(150, (100,), grid_around("emnist", WIDE), OF_THE_PAPER, IMAGES),
    # A round costs twenty of EMNIST's, and keeps a device busy.
    "cifar100": Study(
        100, (100,), grid_around("cifar100", NARROW), OF_THE_PAPER, IMAGES, together=1
    ),
    "emnist-autoencoder": Study(
        150,
        (100,),
        autoencoder_grid,
        # Those without published rates for this task.
        tuple(
            f"{method}-{optimiser}"
            for method in ("fedda", "mimelite", "mfl", "fedlocal")
            for optimiser in ("sgdm", "adam", "adagrad")
        ),
        {"pipeline": "fedopt"},
        {"units": "delta"},
    ),
    "stackexchange": Study(
        100,
        (100,),
        text_grid,
        OF_THE_PAPER,
        {"pipeline": "fedopt"},
        {"units": "delta", "eps": 1e-3, "tau": 1e-3},
    ),
}


def base(task: str, name: str, **own: Any) -> config.Config:
    """What all points of an algorithm share."""
    study = STUDIES[task]
    known = algorithms.settings(name, {})
    fixed = {key: value for key, value in study.fixed.items() if key in known}
    if name == "climb":  # whose eps is a loss, and no part of a denominator
        fixed = {}
    published = methods.settings(task).get(name, {}) if study.run else {}
    values = {**algorithms.defaults(name), **published, **study.run, **fixed, **own}
    return config.resolve(
        {"task": task, "algorithm": name, "rounds": study.rounds, "seed": study.seeds[0]} | values
    )


def tune(task: str, name: str, folder: Path, **own: Any) -> None:
    """Trains every point, and writes what became of them."""
    study, path = STUDIES[task], folder / task / f"{name}.json"
    if path.exists():
        return
    work = folder / ".work" / task / name
    summary = sweep.run(
        with_memory(base(task, name, **own)),
        study.grid_of(name),
        len(study.seeds),
        work,
        together=study.together,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(summary, indent=1) + "\n")
    shutil.rmtree(work)
    best = summary["best"]
    words = (
        "no point stayed finite" if best is None else f"{best['hyper']} {best['train_loss']:.4f}"
    )
    print(f"{name}: {words}; {summary['seconds']['total']:.0f} s", flush=True)


def _seeds(seeds: list[int]) -> str:
    return (
        f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of the seeds {', '.join(map(str, seeds))}"
    )


def preset(task: str, folder: Path) -> str:
    """The file of presets, of what was written about each algorithm."""
    found = [json.loads(path.read_text()) for path in sorted((folder / task).glob("*.json"))]
    first = found[0]
    points = math.prod(map(len, first["grid"].values()))
    lines = [
        f"# Written by benchmarks/tune.py {task}: of {points} points for every algorithm the one",
        f"# with the lowest training loss over the last {first['averaged_rounds']} of "
        f"{first['rounds']} rounds,",
        f"# {_seeds(first['seeds'])}. What each came to is in results/tuning/{task}.",
    ]
    for each in found:
        name, best, grid = each["algorithm"], each["best"], each["grid"]
        if best is None:
            lines += ["", f"# [{name}]: no point stayed finite"]
            continue
        defaults = algorithms.defaults(name)
        chosen = {**base(task, name).chosen, **best["hyper"]}
        lines += ["", f"[{name}]  # training loss {best['train_loss']:.4f}"]
        for key, value in chosen.items():
            if key in grid or value != defaults[key]:
                end = "  # the end of the grid" if key in best["at_the_end"] else ""
                lines.append(f"{key} = {json.dumps(value)}{end}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=STUDIES)
    parser.add_argument("--only", default="", help="these algorithms, with commas")
    parser.add_argument("--precision", help="of products, as in fedda run")
    parser.add_argument("--choose", action="store_true", help="train nothing more")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    devices.start_up()  # as the command does: compiled programs are kept
    task = arguments.task
    own = {} if arguments.precision is None else {"precision": arguments.precision}
    every = STUDIES[task].algorithms or algorithms.names()
    names = [name for name in arguments.only.split(",") if name] or every
    for name in names:
        if name not in every:
            parser.error(str(unknown(f"algorithm to tune on {task}", name, every)))
    for name in () if arguments.choose else names:
        tune(task, name, arguments.results, **own)
    missing = [name for name in every if not (arguments.results / task / f"{name}.json").exists()]
    if missing:
        print(f"no presets before these are tuned: {', '.join(missing)}")
        return
    path = config.PRESETS / f"{task}-{config.resolve({'task': task}).model}.toml"
    write_whole(path, preset(task, arguments.results))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
