"""Scikit-learn's bundled handwritten digits: 1,797 real images, no download."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NUM_CLASSES = 10

# The family of each digit, by shape, as the coarse label that Pachinko allocation needs:
# 0 has a closed loop (0 6 8 9), 1 is straight strokes (1 4 7), 2 is open curves (2 3 5).
COARSE = np.array([0, 1, 2, 2, 1, 2, 0, 1, 0, 0], np.int32)

# Not the run's seed: all runs share one test set.
_SPLIT_SEED = 1797


class Digits(NamedTuple):
    """Images are [n, 8, 8, 1] with pixel values 0..16 as stored; `train_coarse` is by shape."""

    train_x: npt.NDArray[np.uint8]
    train_y: npt.NDArray[np.int32]
    test_x: npt.NDArray[np.uint8]
    test_y: npt.NDArray[np.int32]
    train_coarse: npt.NDArray[np.int32]


def load() -> Digits:
    """The digits, 20 % of each class set aside for testing, always the same ones."""
    from sklearn.datasets import load_digits  # takes 0.7 s

    bunch = load_digits()
    x = bunch.images[..., None].astype(np.uint8)
    y = bunch.target.astype(np.int32)
    # RandomState, because NumPy promises never to change its stream; default_rng's may change.
    rng = np.random.RandomState(_SPLIT_SEED)
    is_test = np.zeros(len(y), bool)
    for digit in range(NUM_CLASSES):
        rows = rng.permutation(np.flatnonzero(y == digit))
        is_test[rows[: round(0.2 * len(rows))]] = True
    return Digits(x[~is_test], y[~is_test], x[is_test], y[is_test], COARSE[y[~is_test]])
