"""The methods of the paper: what they and the tasks are called, and their settings."""

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedda import algorithms

SETTINGS = Path(__file__).parent / "settings"

OPTIMISER_NAMES = {"sgdm": "SGDM", "adam": "Adam", "adagrad": "AdaGrad", "yogi": "Yogi"}
METHODS = {  # in the order in which they are run: the most telling first
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
}


TITLES = {
    "cifar100": "CIFAR-100",
    "emnist": "EMNIST",
    "emnist-autoencoder": "EMNIST autoencoder",
    "stackexchange": "Stack Exchange",
    "digits": "Digits",
}


@lru_cache
def settings(task: str) -> dict[str, dict[str, Any]]:
    """The settings of each algorithm on a task, where they are not those of our presets."""
    return tomllib.loads((SETTINGS / f"{task}.toml").read_text(encoding="utf-8"))


def title(task: str) -> str:
    """What a task is called in headings."""
    return TITLES.get(task, task)


def label(algorithm: str) -> str:
    """`FedDA, SGDM` for fedda-sgdm."""
    method, _, optimiser = algorithm.partition("-")
    name = METHODS.get(method, algorithms.makers()[algorithm].__doc__ or method)
    return f"{name.partition(' (')[0].partition('+')[0]}" + (
        f", {OPTIMISER_NAMES[optimiser]}" if optimiser else ""
    )
