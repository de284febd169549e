"""Errors for wrong input. A message says what was got, what was expected, and how to fix it."""

import difflib
import errno
import importlib
import math
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from typing import Any


class InputError(ValueError):
    """Wrong input of a user. The command line prints the message without a traceback."""


class MissingExtraError(InputError, ImportError):
    """An optional package is not installed. The message says how to install it."""


LARGEST = 2**31 - 1  # the largest 32-bit integer, the integer type of a compiled program

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def shown(value: object) -> str:
    """Return the `repr` of a value for an error message, shortened if it is long."""
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; deeply nested lists
        return f"{type(value).__name__} that is too long to print"


def is_finite(value: Any) -> bool:
    """Return whether a real number is finite. Integers beyond the range of floats are not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def unknown(kind: str, got: object, known: Iterable[str]) -> InputError:
    """Return the error for an unknown name, with similar known names as suggestions."""
    names = sorted(known)
    text = got if isinstance(got, str) else shown(got)
    completions = [name for name in names if text and name.startswith(text.lower())]  # "FedDA"
    near = completions[:3] or difflib.get_close_matches(text, names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return InputError(f"unknown {kind} {shown(got)}. {hint}Known: {', '.join(names)}.")


# The words of other libraries for our settings: what must be known for the advice to help, the
# advice, and the words.
_OTHER_WORDS = (
    (
        "client_lr",
        "The learning rate of the clients is client_lr, that of the server is server_lr.",
        "lr learning_rate rate step_size",
    ),
    (
        "client_lr",
        "The learning rate of the clients is client_lr.",
        "eta_l client_learning_rate local_lr local_learning_rate lr_local lr_client",
    ),
    (
        "server_lr",
        "The learning rate of the server is server_lr.",
        "eta eta_g server_learning_rate global_lr lr_server lr_global slr",
    ),
    (
        "local_work",
        "For N epochs give local_unit=epochs local_work=N.",
        "epochs epoch local_epochs num_epochs n_epochs client_epochs client_epochs_per_round "
        "local_num_epochs max_epochs",
    ),
    (
        "local_work",
        "Local steps are counted by local_work.",
        "steps local_steps num_steps local_iterations local_num_steps",
    ),
    (
        "batch",
        "The number of examples in a mini-batch is batch.",
        "batch_size batchsize client_batch_size local_batch_size bs",
    ),
    (
        "rounds",
        "The number of rounds is rounds.",
        "num_rounds n_rounds num_server_rounds server_rounds comm_round comm_rounds total_rounds "
        "max_rounds communication_rounds central_num_iterations",
    ),
    (
        "cohort",
        "The number of clients in a round is cohort.",
        "clients_per_round num_clients_per_round client_num_per_round cohort_size min_fit_clients "
        "sampled_clients clients_sampled",
    ),
    (
        "cohort",
        "The number of clients in a round is cohort, a whole number and not a share.",
        "fraction_fit fraction_train client_fraction participation participation_rate "
        "sample_fraction",
    ),
    (
        "partition",
        "The number of clients is clients.",
        "num_clients n_clients client_num_in_total num_supernodes num_partitions",
    ),
    (
        "partition",
        "A Dirichlet partition is partition=dirichlet:ALPHA.",
        "alpha dirichlet_alpha partition_alpha dirichlet",
    ),
    ("task", "Data and model are chosen by task and model.", "dataset data_set dataset_name"),
    ("seed", "The seed is seed.", "random_seed random_state rng"),
    (
        "eval_every",
        "The number of rounds between evaluations is eval_every.",
        "frequency_of_the_test rounds_per_eval rounds_per_evaluation eval_freq eval_frequency "
        "evaluation_frequency",
    ),
    ("beta1", "The momentum is beta1.", "momentum server_momentum client_momentum beta beta_1"),
    (
        "client_lr",
        "Momentum is a part of the algorithm: fedopt-sgdm (FedAvgM) and fedda-sgdm have beta1.",
        "momentum server_momentum client_momentum beta beta_1",
    ),
    ("beta2", "The decay of the second moment is beta2.", "beta_2"),
    ("eps", "The constant that is added to the denominator is eps.", "tau epsilon"),
    ("mu", "The weight of the proximal term is mu.", "proximal_mu prox_mu fedprox_mu"),
    (
        "client_lr",
        "The optimisers are a part of the algorithm, as in fedda-adam and fedopt-adam (FedAdam): "
        "fedda algorithms lists all.",
        "optimizer optimiser client_optimizer server_optimizer federated_optimizer strategy",
    ),
)


def unknown_setting(kind: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a setting that is not one of `known`; it translates other libraries' words."""
    names = list(known)
    for needed, advice, words in _OTHER_WORDS:
        if needed in names and name.lower() in words.split():
            return InputError(f"unknown {kind} {shown(name)}. {advice}")
    return unknown(kind, name, names)


def unknown_algorithm(name: object, labels: Mapping[str, str]) -> InputError:
    """The error for a name that no algorithm has; `labels` are their names in publications."""

    def letters(text: str) -> str:
        return re.sub(r"[\W_]", "", text).lower()

    for known, label in labels.items():
        if letters(label) == letters(str(name)):
            return InputError(f"unknown algorithm {name!r}: {label} is {known} here.")
    return unknown("algorithm", name, labels)


def check_whole_number(name: str, value: Any, least: int) -> None:
    """Raise an `InputError` unless `value` is an integer from `least` to `LARGEST`.

    NumPy integers are allowed, booleans are not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {shown(value)}.")
    if int(value) > LARGEST:
        raise InputError(f"{name} must be below 2**31, got {shown(value)}.")


def import_extra(module: str, extra: str, action: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: The full name of the module.
        extra: The extra of `fedda` that installs the package.
        action: The action that needs the package, such as "draw figures".

    Raises:
        MissingExtraError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"cannot {action}: {package} is not installed. Install it: pip install 'fedda[{extra}]'"
        ) from error


def is_full(error: OSError) -> bool:
    """Return whether an error says that the disk, or the user's quota, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(option: str) -> Iterator[None]:
    """Turn write errors of the operating system into an `InputError` that names an option.

    Args:
        option: The option with which the user chose the path.
    """
    try:
        yield
    except OSError as error:
        # A missing permission to read a file has nothing to do with the option.
        reading = isinstance(error, PermissionError) and os.path.isfile(error.filename or "")
        if reading or (error.filename is None and not is_full(error)):
            raise
        where = "" if error.filename is None else f" to {error.filename}"
        advice = "Free some space there, or give" if is_full(error) else "Give"
        raise InputError(
            f"cannot write{where} ({error.strerror}). {advice} another {option}."
        ) from None
