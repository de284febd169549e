"""The algorithms, one file for each method. See `fedda.algorithms.registry` for how to add one."""

from fedda.algorithms.registry import (
    Reduction,
    communication,
    configure,
    defaults,
    domains,
    get,
    hyper,
    makers,
    module_of,
    modules,
    names,
    options,
    plain,
    reductions,
    settings,
    unbiased,
)

__all__ = [
    "Reduction",
    "communication",
    "configure",
    "defaults",
    "domains",
    "get",
    "hyper",
    "makers",
    "module_of",
    "modules",
    "names",
    "options",
    "plain",
    "reductions",
    "settings",
    "unbiased",
]
