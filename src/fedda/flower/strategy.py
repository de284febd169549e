"""FedDA as a Flower strategy, for clients that have their own training loop.

The server sends the model alone, as `FedAvg` does. A client starts with momentum 0, and the server
adds what the momentum of earlier rounds contributes. This gives the same numbers as a client that
starts with the server's momentum (see the option `sends` in `fedda.algorithms.fedda`).

So only the replies differ from those of `FedAvg`. `fedda.torch.reply_arrays` makes their
`ArrayRecord`. For every array NAME of the model that the client's optimiser trains, it contains

    fedda/gradients/NAME    the sum of the gradients of all local steps
    fedda/momentum/NAME     the momentum after the last step

All other arrays of the model, such as the statistics of BatchNorm, have their own names, and the
server averages them. The numbers `fedda/steps`, `fedda/lr`, `fedda/beta1` and `fedda/mu` describe
the local training.
"""

import inspect
import logging
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, Result
from flwr.serverapp.strategy.strategy_utils import validate_message_reply_consistency

from fedda import algorithms
from fedda.algorithms import fedda
from fedda.core import local
from fedda.core.tree import PyTree
from fedda.errors import InputError, check_whole_number, unknown
from fedda.flower.messages import NOT_FINITE, MessageError, NotFiniteError, read_array

log = logging.getLogger("flwr")  # in order, between the lines of the other strategies
OPTIMIZERS = ("adagrad", "adam", "sgdm")
GRADIENTS, MOMENTUM = "fedda/gradients/", "fedda/momentum/"
NUMBERS = ("steps", "lr", "beta1", "mu")


class FedDA(FedAvg):
    """Flower's strategy for FedDA (Jin et al., ICML 2022).

    Clients run plain SGD with `fedda.torch.DecoupledSGD`, which also accumulates a momentum. They
    reply with `fedda.torch.reply_arrays`. The server averages the momenta, weighted like `FedAvg`,
    and updates the model with its own optimiser. The strategy adds `lr`, `beta1` and `mu` to the
    `train_config` that clients receive.

    A reply that is not valid is left out and logged. If no reply can be used, the model stays as it
    is. The server's step is computed in double precision.

    Args:
        optimizer: The server's optimiser: `"adam"`, `"adagrad"` or `"sgdm"`.
        client_lr: The learning rate of the clients. They receive it as `lr`.
        server_lr: The learning rate of the server. None uses 0.1, or 1.0 for `"sgdm"`.
        **settings: Other hyper-parameters and options of FedDA, such as `beta1`, `beta2`, `eps` or
            `units`, which `fedda algorithms fedda-adam` explains; and all arguments of Flower's
            `FedAvg`, such as `fraction_train`.

    Raises:
        InputError: A setting is unknown, or its value is not allowed.

    Example:
        >>> from fedda.flower import FedDA
        >>> strategy = FedDA(optimizer="adam", client_lr=0.1, server_lr=0.05, fraction_train=0.5)
        >>> strategy.hyper.beta2
        0.99
    """

    def __init__(
        self,
        optimizer: str = "adam",
        *,
        client_lr: float = 0.1,
        server_lr: float | None = None,
        **settings: Any,
    ) -> None:
        if optimizer not in OPTIMIZERS:
            raise unknown("optimizer of FedDA", optimizer, OPTIMIZERS)
        of_flower = inspect.signature(FedAvg).parameters
        super().__init__(**{name: settings.pop(name) for name in of_flower if name in settings})
        if settings.get("beta1_per") == "round":
            raise InputError(
                "beta1_per of the strategy must be step, got 'round': its clients take beta1 per "
                "local step. Give beta1 ** (1 / steps) as beta1."
            )
        chosen = dict(sends="model", client_lr=client_lr, **settings)
        if server_lr is not None:
            chosen["server_lr"] = server_lr
        algorithm, self.hyper = algorithms.configure(f"fedda-{optimizer}", chosen, of_flower)
        self.algorithm = algorithm
        self.arrays = ArrayRecord()  # the model that the clients have received
        self.trained: frozenset[str] = frozenset()  # the arrays that their optimisers train
        self.state: Any = None  # the server's state after the round before

    def summary(self) -> None:
        """Log the settings."""
        log.info("\t├──> FedDA: %s", self.hyper)
        super().summary()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        *others: Any,
        **named: Any,
    ) -> Result:
        """Train for `num_rounds` rounds, as `FedAvg.start` does with the same arguments.

        Every call starts with momentum 0.

        Raises:
            InputError: `num_rounds` is not positive, `train_config` has another learning rate, or
                the clients' replies are not those of FedDA.
        """
        check_whole_number("num_rounds", num_rounds, least=1)
        self.trained, self.state = frozenset(), None
        return super().start(grid, initial_arrays, num_rounds, *others, **named)

    def _rates(self) -> dict[str, float]:
        return {"lr": self.hyper.client_lr, "beta1": self.hyper.beta1, "mu": self.hyper.mu}

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages to the sampled clients: those of `FedAvg`, with the rates."""
        for name, value in self._rates().items():
            if config.get(name, value) != value:
                raise InputError(
                    f"{name} of train_config must be {value:g}, as in the strategy, got "
                    f"{config[name]!r}. Leave it out: the strategy sends it."
                )
            config[name] = value
        self.arrays = arrays
        return super().configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the model after the round and the clients' mean metrics.

        Raises:
            InputError: There are replies without errors, but none is a reply to FedDA.
        """
        answers, _ = self._check_and_log_replies(replies, is_train=True, validate=False)
        answers.sort(key=lambda answer: answer.metadata.src_node_id)  # so that sums are repeatable
        if not self.trained:  # a client that trains other arrays than most is left out
            sets = Counter(names for one in answers if (names := _trained_by(one.content)))
            self.trained = max(sets, key=sets.__getitem__, default=frozenset())
        total, used, faults = None, list[RecordDict](), list[MessageError]()
        for answer in answers:
            try:
                part = self._read(answer.content)
            except MessageError as fault:
                log.warning("\t> Left out node %d: %s", answer.metadata.src_node_id, fault)
                faults.append(fault)
            else:
                total = part if total is None else jax.tree.map(np.add, total, part)
                used.append(answer.content)
        wrong = [fault for fault in faults if not isinstance(fault, NotFiniteError)]
        if wrong and not used:
            raise InputError(f"no reply of round {server_round} can be used: {wrong[0]}")
        if total is not None:
            validate_message_reply_consistency(used, self.weighted_by_key, check_arrayrecord=False)
            if (arrays := self._merge(total)) is not None:
                return arrays, self.train_metrics_aggr_fn(used, self.weighted_by_key)
        log.warning("\t> Round %d leaves the model as it is", server_round)
        return None, None

    def _read(self, content: RecordDict) -> local.Weighted:
        """Return the weighted upload of a reply: an `Upload`, and the arrays to average.

        Raises:
            MessageError: The reply is not valid.
        """
        if (len(content.array_records), len(content.metric_records)) != (1, 1):
            raise MessageError("it must contain one ArrayRecord and one MetricRecord")
        (record,), (metrics,) = content.array_records.values(), content.metric_records.values()
        weight = metrics.get(self.weighted_by_key)
        if not isinstance(weight, (int, float)) or not 0 < weight < math.inf:
            raise MessageError(
                f"{self.weighted_by_key} in its MetricRecord must be a positive number, the "
                f"client's weight, got {weight!r}"
            )
        steps = self._check_numbers(record)
        gradients = {name: f"{GRADIENTS}{name}" for name in self.arrays if name in self.trained}
        momentum = {name: f"{MOMENTUM}{name}" for name in gradients}
        averaged = {name: name for name in self.arrays if name not in gradients}
        keys = {key for part in (gradients, momentum, averaged) for key in part.values()}
        sent = set(record) - {f"fedda/{name}" for name in NUMBERS}
        if odd := sorted(keys - sent) or sorted(sent - keys):
            fault = "missing" if odd[0] in keys else "not expected"
            raise MessageError(
                f"{odd[0]} is {fault}. The server and all clients need the same module, and "
                "optimizers of the same parameters."
            )

        def read(name: str, key: str) -> np.ndarray:
            like = self.arrays[name]
            value = read_array(record[key], key, np.dtype(like.dtype), tuple(like.shape))
            allowed = name in averaged and ~np.isfinite(like.numpy())  # such as a mask of -inf
            if not (np.isfinite(value) | allowed).all():
                raise NotFiniteError(f"{key} is not finite. {NOT_FINITE}")
            return value.astype(float)

        upload = fedda.Upload(
            gradients={name: read(name, key) for name, key in gradients.items()},
            momentum={name: read(name, key) for name, key in momentum.items()},
            steps=local.Counter(np.float64(steps)),
            decay=local.Counter(np.float64(self.hyper.beta1**steps)),
        )
        parts = upload, {name: read(name, key) for name, key in averaged.items()}
        return local.Weighted(jax.tree.map(lambda x: weight * x, parts), np.float64(weight))

    def _check_numbers(self, record: ArrayRecord) -> float:
        """Return the number of local steps, after checks of the numbers in a reply."""
        if not self.trained or any(f"fedda/{name}" not in record for name in NUMBERS):
            raise MessageError(
                "it has no momentum. In the client's reply, replace "
                "ArrayRecord(model.state_dict()) by fedda.torch.reply_arrays(model, optimizer)."
            )
        steps, *rates = (
            float(read_array(record[f"fedda/{name}"], f"fedda/{name}", np.dtype(float), ()))
            for name in NUMBERS
        )
        for (name, expected), rate in zip(self._rates().items(), rates, strict=True):
            if not math.isclose(rate, expected, rel_tol=1e-6):
                raise MessageError(
                    f"its optimizer has {name}={rate:g}, but the strategy has {expected:g}. Create "
                    f"DecoupledSGD with {name}=message.content[{self.configrecord_key!r}][{name!r}]"
                )
        if not 0 <= steps < math.inf:
            raise MessageError(f"its number of local steps must not be negative, got {steps:g}")
        return steps

    def _merge(self, total: local.Weighted) -> ArrayRecord | None:
        """Return the new model. Return None, and keep the state, if a number is not finite."""
        (upload, averaged), weight = total
        params = {name: self.arrays[name].numpy().astype(float) for name in upload.gradients}
        with jax.enable_x64(True):
            state = self.state or jax.device_get(self.algorithm.init(self.hyper, params))
            state = state._replace(params=params)
            sums = local.Weighted(upload, weight)
            after = jax.device_get(_merge(self.algorithm.phases[0], self.hyper, state, sums))
        values = {name: _cast(value, self.arrays[name]) for name, value in after.params.items()}
        if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((values, after))):
            return None
        self.state = after
        values |= {name: _cast(x / weight, self.arrays[name]) for name, x in averaged.items()}
        return ArrayRecord({name: Array(values[name]) for name in self.arrays})


def _trained_by(content: RecordDict) -> frozenset[str]:
    """Return the names of the arrays that the optimiser of a reply trains."""
    keys = [key for record in content.array_records.values() for key in record]
    return frozenset(key.removeprefix(GRADIENTS) for key in keys if key.startswith(GRADIENTS))


def _cast(value: PyTree, like: Array) -> np.ndarray:
    """Return the array in the type of `like`. Means of integers are rounded."""
    dtype = np.dtype(like.dtype)
    with np.errstate(over="ignore"):
        return np.asarray(value if dtype.kind == "f" else np.rint(value)).astype(dtype)


_merge = jax.jit(lambda phase, hp, state, total: phase.merge(hp, state, total), static_argnums=0)
