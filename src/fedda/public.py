"""The public names of the library: `fedda.run` is `run` of this module."""

from fedda import algorithms, models
from fedda.api import run, run_grid
from fedda.core import losses
from fedda.core.algorithm import Algorithm, Phase
from fedda.data.preparation import Preparation
from fedda.data.tabular import Federation, federation
from fedda.experiments.load import load
from fedda.models import Model
from fedda.reports.results import report
from fedda.simulate.evaluation import evaluate
from fedda.simulate.result import GridPoint, Result
from fedda.storage.interrupts import Interrupted

__all__ = [
    "Algorithm",
    "Federation",
    "GridPoint",
    "Interrupted",
    "Model",
    "Phase",
    "Preparation",
    "Result",
    "algorithms",
    "evaluate",
    "federation",
    "load",
    "losses",
    "models",
    "report",
    "run",
    "run_grid",
]
