"""Every algorithm of this folder, found by name: a new one is one new file, listed nowhere.

A module offers `variants`, a dictionary from names to functions that make an `Algorithm`; the
keyword arguments of such a function are the options that change the program and not just a number,
annotated as `Literal`. It may declare `reductions`, identities that the tests check, and
`unbiased`, the names of its variants that come to rest at the optimum of the federation's loss
however many local steps clients take; the tests check these, too, and that no other does.
"""

import importlib
import inspect
import pkgutil
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from numbers import Real
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedda.core.algorithm import Algorithm, Domain
from fedda.errors import InputError, is_finite, shown, unknown


class Reduction(NamedTuple):
    """`name` with these hyper-parameters (and options) is `other` with `other_hyper`."""

    name: str
    hyper: Mapping[str, float]
    other: str
    other_hyper: Mapping[str, float] = {}
    options: Mapping[str, str] = {}


@lru_cache
def modules() -> tuple[ModuleType, ...]:
    """The modules of this folder."""
    package = importlib.import_module(__package__)
    found = sorted({info.name for info in pkgutil.iter_modules(package.__path__)} - {"registry"})
    return tuple(importlib.import_module(f"{__package__}.{name}") for name in found)


@lru_cache
def makers() -> Mapping[str, Callable[..., Algorithm]]:
    """The name of every algorithm, with the function that makes it."""
    return {name: make for module in modules() for name, make in module.variants.items()}


def names() -> list[str]:
    return list(makers())


def reductions() -> list[Reduction]:
    return [each for module in modules() for each in getattr(module, "reductions", ())]


def unbiased() -> list[str]:
    """The algorithms that rest at the optimum, however many local steps clients take."""
    return [name for module in modules() for name in getattr(module, "unbiased", ())]


def module_of(name: str) -> ModuleType:
    """The module that holds an algorithm; its docstring holds the equations."""
    return next(module for module in modules() if name in module.variants)


def communication(name: str) -> tuple[int, int] | None:
    """The models sent down and up in a round, as the docstring says; None if it says nothing.

    The tests count them.
    """
    text = " ".join(
        (module_of(name).__doc__ or "").partition("Communication, in models:")[2].split()
    )
    for down, up, variants in re.findall(r"(\d+) down, (\d+) up(?: \(([^)]*)\))?", text):
        if not variants or name in variants.split(", "):
            return int(down), int(up)
    return None


@lru_cache
def options(name: str) -> dict[str, tuple[str, ...]]:
    """The options of an algorithm and their values; the first of each is the default."""
    make = _maker(name)
    hints = typing.get_type_hints(make)
    found = {}
    for parameter in inspect.signature(make).parameters.values():
        values = typing.get_args(hints[parameter.name])
        found[parameter.name] = (
            parameter.default,
            *(value for value in values if value != parameter.default),
        )
    return found


def settings(name: str, chosen: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of an algorithm's options and hyper-parameters, under these of its options."""
    known = options(name)
    record = get(name, **{key: value for key, value in chosen.items() if key in known})
    return (*known, *record.Hyper._fields)


def defaults(name: str, **chosen: str) -> dict[str, Any]:
    """What an algorithm's options and hyper-parameters are, with these options, if nobody asks."""
    own = {option: values[0] for option, values in options(name).items()}
    return own | get(name, **chosen).Hyper._field_defaults


def get(name: str, **chosen: str) -> Algorithm:
    """The algorithm with this name; equal requests give one and the same record."""
    known = options(name)
    for option, value in chosen.items():
        if option not in known:
            raise unknown(f"option of {name}", option, known)
        if value not in known[option]:
            raise unknown(f"value of {option} of {name}", value, known[option])
    defaults = {option: values[0] for option, values in known.items()}
    return _get(name, tuple((defaults | chosen).items()))


@lru_cache
def _get(name: str, chosen: tuple[tuple[str, str], ...]) -> Algorithm:
    return _maker(name)(**dict(chosen))


def _maker(name: str) -> Callable[..., Algorithm]:
    if name not in makers():
        for own, make in makers().items():
            published = (make.__doc__ or "").partition(" (")[0]
            if _letters(published) == _letters(str(name)):
                raise InputError(f"unknown algorithm {name!r}: {published} is {own} here.")
        raise unknown("algorithm", name, makers())
    return makers()[name]


def _letters(name: str) -> str:
    return re.sub(r"[\W_]", "", name).lower()


def domains(Hyper: Any) -> dict[str, Domain]:
    """What each field of a `Hyper` may be."""
    hints = typing.get_type_hints(Hyper, include_extras=True)
    return {field: hints[field].__metadata__[0] for field in Hyper._fields}


def plain(value: Any) -> Any:
    """A number that NumPy or JAX made as one of Python's; anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


def hyper(name: str, algorithm: Algorithm, values: Mapping[str, Any]) -> Any:
    """The `Hyper` of an algorithm with these values and its defaults, checked."""
    known = domains(algorithm.Hyper)
    values = {field: plain(value) for field, value in values.items()}
    for field, value in values.items():
        if field not in known:
            raise unknown(f"hyper-parameter of {name}", field, known)
        if isinstance(value, bool) or not isinstance(value, Real) or not is_finite(value):
            raise InputError(f"{field} of {name} must be {known[field].words}, got {shown(value)}.")
        with np.errstate(over="ignore"):
            used = float(jnp.asarray(float(value)))  # 1 - 1e-9 is 1 in single precision
        if not is_finite(used) or not known[field].allows(used):
            rounded = known[field].allows(float(value))
            as_used = f", which is {used:g} in {jnp.zeros(()).dtype}" if rounded else ""
            raise InputError(
                f"{field} of {name} must be {known[field].words}, got {value!r}{as_used}."
            )
    return algorithm.Hyper(**{field: float(value) for field, value in values.items()})


def configure(
    algorithm: str | Algorithm, chosen: Mapping[str, Any], also_known: Iterable[str] = ()
) -> tuple[Algorithm, Any]:
    """The record and its `Hyper` from a mix of options and hyper-parameters, both by name.

    `also_known` are other names that the user of a wrong one may have meant.
    """
    if isinstance(algorithm, Algorithm):
        name, record, known = "this algorithm", algorithm, {}
    else:
        name, known = algorithm, options(algorithm)
        record = get(name, **{key: value for key, value in chosen.items() if key in known})
    values = {key: value for key, value in chosen.items() if key not in known}
    for key in values:
        if key not in record.Hyper._fields:
            own = (*known, *record.Hyper._fields)
            raise unknown(f"setting of {name}", key, (*own, *also_known))
    return record, hyper(name, record, values)
