"""Choose the presets of a task by the FedDA paper's rule, with one budget for every algorithm.

    python -m fedda_reproduction.tune emnist --precision bf16
    python -m fedda_reproduction.tune emnist --only fedda-sgdm,fedavg
    python -m fedda_reproduction.tune emnist --choose

The rule: of every grid in `paper/tuning.toml`, the point with the lowest training loss, averaged
over the last rounds and over the seeds, is chosen. The test set is not used. The results of all
points are written to reproduction/results/tuning/<task>/<algorithm>.json. An algorithm with such
a file is not trained again. When all files exist, the chosen points are written to
src/fedda/tasks/presets/<task>-<model>.toml; --choose does only this.
"""

import argparse
import json
import math
import shutil
import tomllib
from pathlib import Path
from typing import Any

from fedda import algorithms
from fedda.errors import unknown
from fedda.experiments import sweep
from fedda.simulate import devices
from fedda.storage.files import write_whole
from fedda.tasks import config
from fedda_reproduction.paper import methods
from fedda_reproduction.paper.training import with_memory

FILE = Path(__file__).parent / "paper" / "tuning.toml"
STUDIES: dict[str, dict[str, Any]] = tomllib.loads(FILE.read_text(encoding="utf-8"))


def grids(task: str) -> dict[str, dict[str, list[float]]]:
    """Return the grid of every algorithm that is tuned on a task."""
    return {name: part["grid"] for part in STUDIES[task]["grids"] for name in part["algorithms"]}


def base(task: str, name: str, **changes: Any) -> config.Config:
    """Return the settings that all points of an algorithm share."""
    study = STUDIES[task]
    part = next(part for part in study["grids"] if name in part["algorithms"])
    return config.resolve(
        {"task": task, "algorithm": name, "rounds": study["rounds"], "seed": study["seeds"][0]}
        | algorithms.defaults(name)
        | methods.settings(task).get(name, {})
        | study.get("run", {})
        | part.get("set", {})
        | changes
    )


def tune(task: str, name: str, folder: Path, **changes: Any) -> None:
    """Train every point of an algorithm and write the results, unless they exist."""
    study, path = STUDIES[task], folder / task / f"{name}.json"
    if path.exists():
        return
    work = folder / ".work" / task / name
    plan, grid = with_memory(base(task, name, **changes)), grids(task)[name]
    seeds, together = len(study["seeds"]), study.get("together")
    summary = sweep.run(plan, grid, seeds, work, together=together)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(summary, indent=1) + "\n")
    shutil.rmtree(work)
    best = summary["best"]
    result = "no point is finite" if best is None else f"{best['hyper']} {best['train_loss']:.4f}"
    print(f"{name}: {result}; {summary['seconds']['total']:.0f} s", flush=True)


def preset(task: str, folder: Path) -> str:
    """Return the text of the presets file, from the results of all algorithms."""
    results = [json.loads(path.read_text()) for path in sorted((folder / task).glob("*.json"))]
    first = results[0]
    points = math.prod(map(len, first["grid"].values()))
    seeds = ", ".join(map(str, first["seeds"]))
    rounds = f"the last {first['averaged_rounds']} of {first['rounds']} rounds"
    lines = [
        f"# Written by fedda_reproduction.tune {task}: of {points} points, each algorithm's with",
        f"# the lowest training loss over {rounds} and the seeds",
        f"# {seeds}. All points are in reproduction/results/tuning/{task}.",
    ]
    for result in results:
        name, best, grid = result["algorithm"], result["best"], result["grid"]
        if best is None:
            lines += ["", f"# [{name}]: no point is finite"]
            continue
        defaults = algorithms.defaults(name)
        lines += ["", f"[{name}]  # training loss {best['train_loss']:.4f}"]
        for key, value in {**base(task, name).chosen, **best["hyper"]}.items():
            if key in grid or value != defaults[key]:
                end = "  # the end of the grid" if key in best["at_the_end"] else ""
                lines.append(f"{key} = {json.dumps(value)}{end}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=STUDIES)
    parser.add_argument("--only", default="", help="only these algorithms, separated by commas")
    parser.add_argument("--precision", help="the precision of products, as in fedda run")
    parser.add_argument("--choose", action="store_true", help="train nothing, only choose")
    parser.add_argument("--results", type=Path, default=Path("reproduction/results/tuning"))
    arguments = parser.parse_args()
    devices.start_up()  # as the command does: compiled programs are kept
    task, every = arguments.task, grids(arguments.task)
    changes = {} if arguments.precision is None else {"precision": arguments.precision}
    names = [name for name in arguments.only.split(",") if name] or list(every)
    for name in names:
        if name not in every:
            parser.error(str(unknown(f"algorithm to tune on {task}", name, every)))
    for name in () if arguments.choose else names:
        tune(task, name, arguments.results, **changes)
    missing = [name for name in every if not (arguments.results / task / f"{name}.json").exists()]
    if missing:
        print(f"no presets before these are tuned: {', '.join(missing)}")
        return
    path = config.PRESETS / f"{task}-{config.resolve({'task': task}).model}.toml"
    write_whole(path, preset(task, arguments.results))
    print(f"written to {path}")


if __name__ == "__main__":
    main()
