"""Warnings about a run that works, but whose result is probably not what the user wants."""

import numpy as np

from fedda.core.losses import accuracy
from fedda.data.federation import Ragged, Shards
from fedda.data.streaming import Feed
from fedda.simulate import devices
from fedda.simulate.train import Row, Setup

MOST_VALUES = 1_000_000  # of the sample of which scales are compared
DIFFERENT = 1e3  # the largest scale divided by the smallest
MANY = 0.1  # of all rounds
FEWEST = 50  # test examples, of which an accuracy says something


def about_data(shards: Shards | Feed) -> list[str]:
    """Return a warning if features have very different scales.

    The scale of a feature is its largest minus its smallest value in a sample of the examples. A
    standard deviation would be tiny for a pixel at the border, or a rare word, which need no other
    scale. Only rows of floating-point features are looked at.
    """
    x = shards.x if isinstance(shards, Shards) else None
    if x is None or isinstance(x, Ragged) or getattr(x, "ndim", 0) != 2 or x.dtype.kind != "f":
        return []
    step = -(-x.size // MOST_VALUES)
    sample = np.asarray(x if step == 1 else x[::step], float)
    scales = sample.max(0) - sample.min(0)
    varying = np.flatnonzero(scales)
    if not len(varying):
        return []
    least, most = (int(varying[find(scales[varying])]) for find in (np.argmin, np.argmax))
    if scales[most] / DIFFERENT <= scales[least]:  # the product could overflow
        return []
    return [
        f"the features have very different scales: column {most} of x spans {scales[most]:.3g}, "
        f"column {least} spans {scales[least]:.3g} (columns are counted from 0), so that no "
        "learning rate suits both. Standardise the features: fedda.federation does it for tables."
    ]


def about_run(setup: Setup, row: Row) -> list[str]:
    """Return warnings about a finished run.

    Args:
        setup: The run.
        row: Its last row. A run that skipped every round has no warnings: it is an error.
    """
    found, rounds, skipped = [], row["round"], row["skipped_rounds"]
    if skipped == rounds:
        return []
    if skipped >= MANY * rounds:
        found.append(
            f"{skipped} of {rounds} rounds were skipped, as none of their uploads were finite or "
            f"none of their clients had examples ({row['nonfinite_clients']} uploads were not "
            "finite). Lower client_lr or server_lr, and check that the loss is finite on these "
            "data."
        )
    commonest = _share_of_the_commonest_label(setup)
    if commonest is not None:
        share, error = commonest
        reached = row["accuracy"]
        if not reached > share + error:  # also if it is not a number
            found.append(
                f"after {rounds} rounds the accuracy is {reached:.3g}, no better than always "
                f"predicting the commonest label, which {share:.3g} of the test examples have. "
                "Try other learning rates, train longer, and check that labels belong to examples."
            )
    return found


def _share_of_the_commonest_label(setup: Setup) -> tuple[float, float] | None:
    """Return the share with its standard error; None if it says nothing about the accuracy."""
    if setup.test is None or accuracy not in setup.task.metrics:
        return None
    y = np.asarray(devices.here(setup.test[1]))
    if y.ndim != 1 or y.dtype.kind not in "iu" or len(y) < FEWEST:
        return None
    counts = np.unique(y, return_counts=True)[1]
    share = float(counts.max()) / len(y)
    return None if len(counts) == 1 else (share, float(np.sqrt(share * (1 - share) / len(y))))
