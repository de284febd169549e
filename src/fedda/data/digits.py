"""Scikit-learn's bundled handwritten digits: 1,797 real images, no download."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

NUM_CLASSES = 10

# The coarse label of each digit, for Pachinko allocation, by its shape: 0 has a closed loop
# (0 6 8 9), 1 has straight strokes (1 4 7), 2 has open curves (2 3 5).
COARSE = np.array([0, 1, 2, 2, 1, 2, 0, 1, 0, 0], np.int32)

# All runs share one test set, so this is not the seed of a run.
_SPLIT_SEED = 1797


class Digits(NamedTuple):
    """Images have the shape [n, 8, 8, 1] and pixel values 0..16."""

    train_x: npt.NDArray[np.uint8]
    train_y: npt.NDArray[np.int32]
    test_x: npt.NDArray[np.uint8]
    test_y: npt.NDArray[np.int32]
    train_coarse: npt.NDArray[np.int32]


def load() -> Digits:
    """Return the digits. The same 20 % of each class are always for testing."""
    table = np.loadtxt(_file(), np.int32, delimiter=",")
    x, y = table[:, :-1].reshape(-1, 8, 8, 1).astype(np.uint8), table[:, -1]
    # NumPy never changes the stream of RandomState, unlike that of default_rng.
    rng = np.random.RandomState(_SPLIT_SEED)
    is_test = np.zeros(len(y), bool)
    for digit in range(NUM_CLASSES):
        rows = rng.permutation(np.flatnonzero(y == digit))
        is_test[rows[: round(0.2 * len(rows))]] = True
    return Digits(x[~is_test], y[~is_test], x[is_test], y[is_test], COARSE[y[~is_test]])


def _file() -> Path:
    """Return the file that `sklearn.datasets.load_digits` reads. Importing that takes a second."""
    package: Any = find_spec("sklearn")
    return Path(package.origin).with_name("datasets") / "data" / "digits.csv.gz"
