"""The simulator reproduces the test vectors."""

import pytest

from conformance.reader import first_difference, read_vectors
from fedda import algorithms
from helpers.conformance import TOLERANCE, simulated

pytestmark = pytest.mark.usefixtures("x64")

VECTORS = read_vectors()


@pytest.mark.parametrize("vector", VECTORS, ids=str)
def test_the_simulator_reproduces_the_vector(vector):
    found = list(simulated(vector))
    # Only what follows from the rest may be missing.
    missing = vector.rounds[0].keys() - found[0].keys()
    assert missing <= {"rounds", "gradient"}, missing
    difference = first_difference(vector.rounds, found, TOLERANCE)
    assert difference is None, difference


def test_every_algorithm_and_every_value_of_an_option_has_a_vector():
    for name in algorithms.names():
        vectors = [vector for vector in VECTORS if vector.algorithm == name]
        for option, values in algorithms.options(name).items():
            assert {vector.options[option] for vector in vectors} == set(values), (name, option)
        fields = algorithms.get(name).Hyper._fields
        assert set(fields) == vectors[0].hyper.keys()
    assert {vector.algorithm for vector in VECTORS} == set(algorithms.names())
