"""The algorithms of this folder, by name. A new algorithm is a new file, without a list to edit.

A module defines `variants`, a dictionary from names to `Variant` records. It may define
`reductions`, special cases that equal another algorithm, which the tests check.
"""

import importlib
import inspect
import pkgutil
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from numbers import Real
from types import ModuleType
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedda.core.algorithm import Algorithm, Domain
from fedda.errors import InputError, is_finite, shown, unknown, unknown_algorithm, unknown_setting


class Variant(NamedTuple):
    """A named algorithm. The tests check the numbers of models and `unbiased`.

    Attributes:
        make: Returns the `Algorithm`. Its keyword arguments are the options that change the program
            and not just a number, annotated as `Literal`.
        label: The name in publications.
        reference: Authors and year.
        summary: What the algorithm does, in a few words.
        down: How many models a client receives in a round, with the default options.
        up: How many models it sends.
        unbiased: Whether it converges to the optimum of the federation's loss for any number of
            local steps.
        version: Raised when a correction changes the algorithm's numbers, so that earlier results
            can be recognised.
    """

    make: Callable[..., Algorithm]
    label: str
    reference: str
    summary: str
    down: int
    up: int
    unbiased: bool = False
    version: int = 1


class Reduction(NamedTuple):
    """A special case: `name` with these hyper-parameters and options equals `other`."""

    name: str
    hyper: Mapping[str, float]
    other: str
    other_hyper: Mapping[str, float] = {}
    options: Mapping[str, str] = {}


@lru_cache
def modules() -> tuple[ModuleType, ...]:
    """Return the modules of this folder."""
    package = importlib.import_module(__package__)
    files = sorted({info.name for info in pkgutil.iter_modules(package.__path__)} - {"registry"})
    return tuple(importlib.import_module(f"{__package__}.{name}") for name in files)


@lru_cache
def variants() -> Mapping[str, Variant]:
    """Return the record of every algorithm by its name."""
    return {name: variant for module in modules() for name, variant in module.variants.items()}


def names() -> list[str]:
    """Return the names of all algorithms."""
    return list(variants())


def module_of(name: str) -> ModuleType:
    """Return the module that holds an algorithm; its docstring holds the equations."""
    return next(module for module in modules() if name in module.variants)


@lru_cache
def options(algorithm: str | Algorithm) -> dict[str, tuple[str, ...]]:
    """Return the options of an algorithm and their values; the first of each is the default.

    The record of a user has none.
    """
    if isinstance(algorithm, Algorithm):
        return {}
    make = _variant(algorithm).make
    hints = typing.get_type_hints(make)
    return {
        option: tuple(
            sorted(typing.get_args(hints[option]), key=lambda value: value != parameter.default)
        )
        for option, parameter in inspect.signature(make).parameters.items()
    }


def settings(algorithm: str | Algorithm, chosen: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of an algorithm's options and hyper-parameters, given chosen options."""
    if isinstance(algorithm, Algorithm):
        return tuple(algorithm.Hyper._fields)
    known = options(algorithm)
    record = get(algorithm, **{key: value for key, value in chosen.items() if key in known})
    return (*known, *record.Hyper._fields)


def all_settings(name: str) -> dict[str, Any]:
    """Return all options and hyper-parameters that an algorithm can have, with their defaults."""
    known = defaults(name)
    for option, values in options(name).items():
        for value in values:
            known = defaults(name, **{option: value}) | known
    return known


def defaults(name: str, **chosen: str) -> dict[str, Any]:
    """Return the default options and hyper-parameters of an algorithm, given chosen options."""
    values = {option: values[0] for option, values in options(name).items()}
    return values | get(name, **chosen).Hyper._field_defaults


class Setting(NamedTuple):
    """A hyper-parameter or an option of an algorithm, for people to read."""

    name: str
    default: str
    may_be: str
    condition: str  # the option that it needs, such as `form=keras`; empty if it needs none


def described(algorithm: str | Algorithm) -> list[Setting]:
    """Return the hyper-parameters of an algorithm, then its options."""
    found: dict[str, Setting] = {}
    known = options(algorithm)
    choices = [(option, value) for option, values in known.items() for value in values]
    for option, value in [("", ""), *choices]:  # an option may have more settings
        Hyper = configure(algorithm, {option: value} if option else {})[0].Hyper
        for setting, domain in domains(Hyper).items():
            default = f"{Hyper._field_defaults[setting]:.3g}"
            condition = f"{option}={value}" if option else ""
            found.setdefault(setting, Setting(setting, default, domain.description, condition))
    chosen = [
        Setting(option, values[0], " or ".join(values), "") for option, values in known.items()
    ]
    return [*found.values(), *chosen]


def get(name: str, **chosen: str) -> Algorithm:
    """Return an algorithm by name. Equal arguments return the same record.

    Args:
        name: One of `names()`.
        **chosen: Options; the others have their defaults.

    Raises:
        InputError: There is no such algorithm, option or value.
    """
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
    return variants()[name].make(**dict(chosen))


def _variant(name: str) -> Variant:
    if name not in variants():
        raise unknown_algorithm(name, {key: found.label for key, found in variants().items()})
    return variants()[name]


def domains(Hyper: type[Any]) -> dict[str, Domain]:
    """Return the domain of each hyper-parameter."""
    hints = typing.get_type_hints(Hyper, include_extras=True)
    return {field: hints[field].__metadata__[0] for field in Hyper._fields}


def plain(value: Any) -> Any:
    """Convert a number of NumPy or JAX to one of Python; return anything else as it is."""
    return value.item() if getattr(value, "shape", None) == () else value


def hyper(name: str, algorithm: Algorithm, values: Mapping[str, Any]) -> Any:
    """Return the `Hyper` of an algorithm with these values and its defaults, checked.

    Args:
        name: What to call the algorithm in errors.
        algorithm: The algorithm.
        values: Hyper-parameters by name.

    Raises:
        InputError: There is no such hyper-parameter, or a value is outside of its domain.
    """
    known = domains(algorithm.Hyper)
    numbers = {}
    for field, given in values.items():
        if field not in known:
            raise unknown_setting(f"hyper-parameter of {name}", field, known)
        value, must_be = plain(given), f"{field} of {name} must be {known[field].description}"
        if isinstance(value, bool) or not isinstance(value, Real) or not is_finite(value):
            raise InputError(f"{must_be}, got {shown(value)}.")
        numbers[field] = float(value)
        with np.errstate(over="ignore"):
            used = float(np.asarray(value, jnp.result_type(float)))  # 1 - 1e-9 is 1 in float32
        if not is_finite(used) or not known[field].allows(used):
            rounded = known[field].allows(numbers[field])
            as_used = f", which is {used:g} in {jnp.zeros(()).dtype}" if rounded else ""
            raise InputError(f"{must_be}, got {value!r}{as_used}.")
    return algorithm.Hyper(**numbers)


def configure(
    algorithm: str | Algorithm, chosen: Mapping[str, Any], also_known: Iterable[str] = ()
) -> tuple[Algorithm, Any]:
    """Return an algorithm and its `Hyper` from options and hyper-parameters.

    Args:
        algorithm: A name, or a record of the user.
        chosen: Options and hyper-parameters by name.
        also_known: More names to suggest instead of a wrong one.

    Raises:
        InputError: A name or value is wrong.
    """
    if isinstance(algorithm, Algorithm):
        name, record, known = "this algorithm", algorithm, {}
    else:
        name, known = algorithm, options(algorithm)
        record = get(name, **{key: value for key, value in chosen.items() if key in known})
    values = {key: value for key, value in chosen.items() if key not in known}
    for key in values:
        if key not in record.Hyper._fields:
            everything = (*known, *record.Hyper._fields, *also_known)
            raise unknown_setting(f"setting of {name}", key, everything)
    return record, hyper(name, record, values)
