"""Federated optimisation, proved against its equations and compiled."""

from fedda import algorithms, losses, models
from fedda.api import GridPoint, run, run_grid
from fedda.continued import Result
from fedda.core import Algorithm, Phase
from fedda.models import Model

__all__ = [
    "Algorithm",
    "GridPoint",
    "Model",
    "Phase",
    "Result",
    "algorithms",
    "losses",
    "models",
    "run",
    "run_grid",
]

__version__ = "0.1.0.dev0"
