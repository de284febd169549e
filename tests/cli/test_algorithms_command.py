"""The command `fedda algorithms`."""

import re

from fedda import algorithms
from fedda.algorithms import registry


def test_equations_are_not_broken(fedda):
    _, out, _ = fedda("algorithms", "fedda-adam")
    assert (registry.module_of("fedda-adam").__doc__ or "-").strip() in out


def test_algorithms_lists_all_and_shows_each(fedda):
    _, out, _ = fedda("algorithms")
    for name in algorithms.names():
        assert name in out
        _, shown, _ = fedda("algorithms", name)
        assert "Communication" in shown
        for field in algorithms.get(name).Hyper._fields:
            assert field in shown
        for option in algorithms.options(name):
            assert option in shown


def test_algorithms_are_listed_with_the_models_they_send(fedda):
    code, out, _ = fedda("algorithms")
    assert code == 0
    assert re.search(r"fedavg +1/1 +FedAvg \(McMahan et al. 2017\): local SGD", out)
    assert re.search(r"mime-adam +5/2 +Mime\+Adam", out)
