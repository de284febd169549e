"""The names of the paper's methods, optimisers and tasks, and the settings of the methods."""

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

OPTIMISER_NAMES = {"sgdm": "SGDM", "adam": "Adam", "adagrad": "AdaGrad", "yogi": "Yogi"}
METHODS = {
    "fedda": "FedDA",
    "fedopt": "FedOpt",
    "fedavg": "FedAvg",
    "fedlin": "FedLin",
    "mimelite": "MimeLite",
    "mfl": "MFL",
    "fedlocal": "FedLocal",
    "scaffold": "SCAFFOLD",
    "climb": "CLIMB",
    "stem": "STEM",
    "fedprox": "FedProx",
    "mime": "Mime",
}
TASKS = {
    "cifar100": "CIFAR-100",
    "emnist": "EMNIST",
    "emnist-autoencoder": "EMNIST autoencoder",
    "stackexchange": "Stack Exchange",
    "digits": "Digits",
}


@lru_cache
def settings(task: str) -> dict[str, dict[str, Any]]:
    """Return the settings of each method on a task, where they are not those of our presets."""
    path = Path(__file__).parent / "settings" / f"{task}.toml"
    return tomllib.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def ordered(algorithms: list[str]) -> list[str]:
    """Sort algorithms by method, in the order of `METHODS`; unknown methods come last."""
    places = {method: place for place, method in enumerate(METHODS)}
    return sorted(algorithms, key=lambda name: places.get(name.partition("-")[0], len(places)))


def label(algorithm: str) -> str:
    """Return the name of a method and its optimiser, such as `FedDA, SGDM` for fedda-sgdm."""
    method, _, optimiser = algorithm.partition("-")
    name = METHODS.get(method, method)
    return f"{name}, {OPTIMISER_NAMES[optimiser]}" if optimiser else name
