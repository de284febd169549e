"""The algorithms, one file for each method. See `fedda.algorithms.registry` for how to add one."""

from fedda.algorithms.registry import configure, defaults, get, hyper, names, options, settings

__all__ = ["configure", "defaults", "get", "hyper", "names", "options", "settings"]
