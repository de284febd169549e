"""The client of a federation that trains a PyTorch module.

`client_app` is a whole one; `begin_round` and `end_round` do the same for a loop of your own. What
is sent is what JAX clients send, so both kinds can serve in one federation.
"""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextlib import contextmanager
from itertools import chain, islice, repeat
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from jax import random
from torch.nn import Module, Parameter
from torch.utils.data import DataLoader

import torch
from fedda import algorithms
from fedda.algorithms import fedda
from fedda.core.local import Counter, weighted_by
from fedda.core.tree import PyTree
from fedda.errors import InputError, check_whole_number, unknown
from fedda.flower import messages
from fedda.flower.client import introduce, partition
from fedda.torch.bridge import DTYPES, load, parameters, private_buffer, to_array, to_tensor
from fedda.torch.decoupled_sgd import DecoupledSGD
from torch import Tensor

ALGORITHMS = ("fedavg", "fedda-adagrad", "fedda-adam", "fedda-sgdm")

# ---------------------------------------------------------------------------------- one round


def begin_round(content: RecordDict, module: Module, optimizer: DecoupledSGD) -> messages.Order:
    """Gives the module and the optimiser what the server sent; returns what the server asks for.

    If the order is `full`, that is one step with the mean gradient of all examples.
    """
    order = messages.Order.read(content)
    settings = _settings(order)
    own = _federated(module, optimizer)
    like = {
        name: jax.ShapeDtypeStruct(w.shape, jax.dtypes.canonicalize_dtype(DTYPES[w.dtype]))
        for name, w in own.items()
    }
    sent, momentum = content.array_records["message"], {}
    if order.algorithm == "fedavg":
        params = messages.unpack(sent, like)
    elif _options(order).get("sends") == "model":
        params, _ = messages.unpack(sent, fedda.Message(like))
    else:
        params, momentum = messages.unpack(sent, fedda.Message(like, like))
    load(module, params)
    for group in optimizer.param_groups:
        group.update(settings)
    optimizer.start({own[name]: to_tensor(array) for name, array in momentum.items()})
    return order


def end_round(
    order: messages.Order,
    context: Context,
    module: Module,
    optimizer: DecoupledSGD,
    examples: int,
    loss: float,
    visited: int,
) -> RecordDict:
    """The reply to the server after local training.

    `examples` is how many the client has, its weight; `loss` is the sum of the losses of the
    examples that were `visited`, for people to see.
    """
    own, settings = _federated(module, optimizer), _settings(order)
    for group in optimizer.param_groups:
        for name, expected in settings.items():
            if group[name] != expected:
                raise InputError(
                    f"{name} of DecoupledSGD must stay {expected:g} to the end of the round, as "
                    f"the server said, got {group[name]:g}. Leave it to the server: no scheduler."
                )
    if examples < 1:
        raise InputError(f"a client must have at least one example, got examples={examples}.")
    upload = _upload(order, optimizer, own, settings)
    weight = jnp.asarray(float(examples))
    return RecordDict(
        {
            "fedda": order.reply(partition(context)),
            "upload": messages.pack(weighted_by(weight, upload)),
            "seen": MetricRecord({"loss": float(loss), "examples": float(visited)}),
        }
    )


@torch.no_grad()
def _upload(
    order: messages.Order,
    optimizer: DecoupledSGD,
    own: Mapping[str, Parameter],
    settings: Mapping[str, float],
) -> PyTree:
    """What a JAX client would upload, without its weight."""
    states = {name: optimizer.state[w] for name, w in own.items()}
    if order.algorithm == "fedavg":
        return {name: to_array(w - states[name]["start"]) for name, w in own.items()}
    gradients = {name: to_array(state["sum"]) for name, state in states.items()}
    momentum = {name: to_array(state["momentum"]) for name, state in states.items()}
    options, dtype = _options(order), jnp.result_type(float)
    steps = np.asarray(states[next(iter(own))]["step"], dtype)
    decay = np.asarray(settings["beta1"] ** steps, dtype)
    counted = options.get("bias") == "steps"
    known = counted or options.get("sends") == "model"
    return fedda.Upload(
        gradients, momentum, Counter(steps if counted else ()), Counter(decay if known else ())
    )


def _options(order: messages.Order) -> dict[str, Any]:
    return dict(json.loads(order.options))


def _settings(order: messages.Order) -> dict[str, float]:
    """The optimiser's settings in the server's words; FedAvg is FedDA without its momentum."""
    if order.algorithm not in ALGORITHMS:
        raise InputError(
            f"the server runs {order.algorithm!r}, but a PyTorch client knows only "
            f"{', '.join(ALGORITHMS)}. Change the server's algorithm, or use JAX clients "
            "(fedda.flower.client_app), which know all."
        )
    algorithm = algorithms.get(order.algorithm, **_options(order))
    hp = algorithms.hyper(order.algorithm, algorithm, order.hyper)
    return {
        "lr": hp.client_lr,
        "beta1": getattr(hp, "beta1", 0.0),
        "mu": getattr(hp, "mu", 0.0),
    }


def _federated(module: Module, optimizer: DecoupledSGD) -> dict[str, Parameter]:
    """The module's parameters, all of which the optimiser must have."""
    own = parameters(module)
    missing = [name for name, parameter in own.items() if parameter not in optimizer.state]
    if missing:
        raise InputError(
            f"DecoupledSGD must have all parameters of the module, but lacks {len(missing)}, the "
            f"first of them {missing[0]}. Make it by DecoupledSGD(module.parameters())."
        )
    return own


# --------------------------------------------------------------------------------- the client


def client_app(
    module: Module,
    loss: Callable[[Any, Any], Any],
    data: Callable[[Context], DataLoader[Any]],
    local_work: int = 5,
    local_unit: Literal["steps", "epochs"] = "steps",
    mods: list[Mod] | None = None,
) -> ClientApp:
    """A client that trains `module`, for FedDA or FedAvg, as the server says.

    `loss(outputs, y)` is the mean over a batch or one number for each example; `data(context)`
    gives a loader of batches `(x, y)`, and is asked once in a process. In a round a client takes
    `local_work` steps, or epochs, from the beginning of the loader and round again. Its random
    numbers depend on the server's seed, the round and the client, and on nothing before.
    """
    parameters(module)
    if local_unit not in ("steps", "epochs"):
        raise unknown("value of local_unit", local_unit, ("steps", "epochs"))
    check_whole_number("local_work", local_work, least=1)
    app = ClientApp(mods=mods)
    optimizer = DecoupledSGD(module.parameters())
    loaders: dict[int, DataLoader[Any]] = {}
    one_at_a_time = threading.Lock()  # all clients of a process share the module

    def loader_of(context: Context) -> DataLoader[Any]:
        number = partition(context)
        if number not in loaders:
            loaders[number] = _checked(data(context))
        return loaders[number]

    @app.query()
    def query(message: Message, context: Context) -> Message:
        examples = _examples(loader_of(context))
        return Message(introduce(context, examples), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        loader = loader_of(context)
        with one_at_a_time:
            order = begin_round(message.content, module, optimizer)
            with _seeded(order, context, module), _same_buffers(module):
                module.train()
                if order.full:
                    seen = _full_step(module, loss, optimizer, loader)
                else:
                    batches = _batches(loader, local_work, local_unit)
                    seen = _steps(module, loss, optimizer, batches)
            content = end_round(order, context, module, optimizer, _examples(loader), *seen)
        return Message(content, reply_to=message)

    return app


def _checked(loader: Any) -> DataLoader[Any]:
    if not isinstance(loader, DataLoader):
        raise InputError(f"data must give a DataLoader, got {type(loader).__name__}.")
    if loader.batch_size is None or loader.drop_last or not hasattr(loader.sampler, "__len__"):
        raise InputError(
            "a client's weight is its number of examples, and a step with all of them needs them "
            "all: the DataLoader must have a batch_size, a dataset with a length, and no drop_last."
        )
    if not _examples(loader):
        raise InputError("the DataLoader must hold at least one example, got none.")
    return loader


def _examples(loader: DataLoader[Any]) -> int:
    """How many there are in an epoch; a sampler may give but a part of the dataset."""
    return len(cast(Sized, loader.sampler))


def _batches(loader: DataLoader[Any], amount: int, unit: str) -> Iterator[Any]:
    epochs = repeat(loader)
    if unit == "epochs":
        return chain.from_iterable(islice(epochs, amount))
    return islice(chain.from_iterable(epochs), amount)


def _losses(
    module: Module, loss: Callable[[Any, Any], Any], batches: Iterable[Any]
) -> Iterator[tuple[Any, int]]:
    """The mean loss of one batch after another, and how many examples that has."""
    device = next(module.parameters()).device
    for batch in batches:
        if [isinstance(part, Tensor) for part in batch] != [True, True]:
            raise InputError(
                f"a batch must be a pair (x, y) of tensors, got a {type(batch).__name__} of "
                f"{len(batch)}. Collate it so, or write the loop between begin_round and end_round."
            )
        x, y = (part.to(device) for part in batch)
        yield loss(module(x), y).mean(), len(y)


def _steps(
    module: Module,
    loss: Callable[[Any, Any], Any],
    optimizer: DecoupledSGD,
    batches: Iterable[Any],
) -> tuple[float, int]:
    """A step for each batch; the sum of the losses that were seen, and of how many examples."""
    total, visited = torch.zeros(()), 0
    for mean, count in _losses(module, loss, batches):
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        total, visited = total + count * mean.detach(), visited + count
    return float(total), visited


def _full_step(
    module: Module,
    loss: Callable[[Any, Any], Any],
    optimizer: DecoupledSGD,
    loader: DataLoader[Any],
) -> tuple[float, int]:
    """One step with the mean gradient of all examples."""
    examples, total = _examples(loader), torch.zeros(())
    optimizer.zero_grad()
    for mean, count in _losses(module, loss, loader):
        (mean * (count / examples)).backward()
        total = total + count * mean.detach()
    optimizer.step()
    return float(total), examples


@contextmanager
def _seeded(order: messages.Order, context: Context, module: Module) -> Iterator[None]:
    """Random numbers that belong to the round and the client; those of the process are kept."""
    high, low = random.key_data(random.fold_in(order.key(), partition(context))).tolist()
    gpus = {w.device.index for w in module.parameters() if w.is_cuda}
    with torch.random.fork_rng(devices=sorted(gpus)):
        torch.manual_seed((high << 32) | low)
        yield


@contextmanager
def _same_buffers(module: Module) -> Iterator[None]:
    """Refuses training that changed what is not sent."""

    def floating() -> dict[str, Tensor]:
        return {name: b.clone() for name, b in module.named_buffers() if b.is_floating_point()}

    before = floating()
    yield
    for name, buffer in floating().items():
        if not torch.equal(buffer, before[name]):
            raise private_buffer(f"training changes the buffer {name!r}")
