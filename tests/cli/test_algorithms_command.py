"""The command `fedda algorithms`."""

import re

from fedda import algorithms


def test_equations_are_not_broken(fedda):
    _, out, _ = fedda("algorithms", "fedda-adam")
    assert (algorithms.module_of("fedda-adam").__doc__ or "-").strip() in out


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


def test_an_algorithm_that_does_not_say_what_it_sends_is_listed(fedda, monkeypatch):
    monkeypatch.setattr(algorithms.module_of("fedavg"), "__doc__", "Mine.")
    code, out, _ = fedda("algorithms")
    assert code == 0
    assert re.search(r"fedavg +- +FedAvg", out)
    assert re.search(r"scaffold +2/2", out)
