import subprocess
import sys
import zlib

import numpy as np
import pytest
from sklearn.datasets import load_digits

from fedda.data import digits


@pytest.fixture(scope="module")
def data():
    return digits.load()


def test_shapes_and_types(data):
    assert data.train_x.shape == (1438, 8, 8, 1)
    assert data.test_x.shape == (359, 8, 8, 1)
    assert data.train_x.dtype == data.test_x.dtype == np.uint8
    assert data.train_x.max() == data.test_x.max() == 16  # as stored, not scaled
    for labels in (data.train_y, data.test_y, data.train_coarse):
        assert labels.dtype == np.int32
    assert len(data.train_y) == len(data.train_coarse) == 1438
    assert len(data.test_y) == 359


def test_train_and_test_are_disjoint_and_complete(data):
    # The 1,797 images are distinct, so each must come back once and with its own label.
    def rows(x, y):
        return sorted(
            (*image, label) for image, label in zip(x.reshape(len(x), -1), y, strict=True)
        )

    bunch = load_digits()
    stored = rows(bunch.data.astype(np.uint8), bunch.target)
    assert len(set(stored)) == 1797
    x = np.concatenate([data.train_x, data.test_x])
    assert rows(x, np.concatenate([data.train_y, data.test_y])) == stored


def test_images_are_unchanged(data):
    # Upright, not only the same pixels: the first training image is one of the stored 8x8 images.
    same = (load_digits().images == data.train_x[0, :, :, 0]).all(axis=(1, 2))
    assert same.sum() == 1


def test_stratified(data):
    train, test = (np.bincount(y, minlength=10) for y in (data.train_y, data.test_y))
    assert np.abs(test - 0.2 * (train + test)).max() <= 0.5


def test_always_the_same_split(data):
    np.random.seed(7)  # the global state must not matter
    for one, other in zip(data, digits.load(), strict=True):
        np.testing.assert_array_equal(one, other)
    # A golden value on purpose: with another test set, results are no longer comparable.
    assert zlib.crc32(data.test_x.tobytes()) == 0xCDEDBA5A


def test_split_is_random_within_a_class(data):
    # The file is in order of writer: a test set of its first or last fifth would be other writers.
    bunch = load_digits()
    position = {image.tobytes(): i for i, image in enumerate(bunch.images.astype(np.uint8))}
    where = [position[image.tobytes()] for image in data.test_x]
    # Mean of 359 of 1,797 positions drawn without replacement: 898 with standard error 24.5.
    assert abs(np.mean(where) - 898) < 4 * 24.5


def test_coarse_labels_group_whole_digits(data):
    assert len(digits.COARSE) == digits.NUM_CLASSES
    assert sorted(set(digits.COARSE.tolist())) == [0, 1, 2]
    np.testing.assert_array_equal(data.train_coarse, digits.COARSE[data.train_y])


def test_import_does_not_load_sklearn():
    check = "import sys, fedda.data.digits; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
