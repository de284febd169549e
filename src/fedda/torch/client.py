"""The Flower client for PyTorch modules.

`client_app` returns a complete client. `begin_round` and `end_round` are for custom training loops.
The messages are the same as those of JAX clients, so a federation may have clients of both kinds.
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
import torch
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from jax import random
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.data import DataLoader

from fedda import algorithms
from fedda.algorithms import fedda
from fedda.core.local import Counter, weighted_by
from fedda.core.tree import PyTree
from fedda.errors import InputError, check_whole_number, unknown
from fedda.flower import client as flower_client
from fedda.flower.client import build_app, build_reply, partition
from fedda.flower.messages import Order, unpack
from fedda.models.torch import DTYPES, load, parameters, private_buffer, to_array, to_tensor
from fedda.torch.decoupled_sgd import DecoupledSGD

ALGORITHMS = ("fedavg", "fedda-adagrad", "fedda-adam", "fedda-sgdm")

# ---------------------------------------------------------------------------------- one round


def introduce(context: Context, examples: int) -> RecordDict:
    """Return the reply to the server's query: the client's number, and what it supports.

    The number of examples is only checked, not sent: secure aggregation keeps it secret.

    Args:
        context: The Flower context of the node.
        examples: The number of the client's examples.

    Raises:
        InputError: The client has no examples, so it cannot take part.
    """
    return flower_client.introduce(context, examples, ALGORITHMS)


def begin_round(content: RecordDict, module: Module, optimizer: DecoupledSGD) -> Order:
    """Load the server's message into the module and the optimiser, before local training.

    Args:
        content: The content of the server's message.
        module: The module to train.
        optimizer: The optimiser, with all parameters of the module.

    Returns:
        The server's order. If `order.full` is true, take one step with the mean gradient of all
        examples instead of the usual local steps.

    Raises:
        InputError: The server's algorithm is not one of `ALGORITHMS`, or the optimiser lacks
            parameters of the module.
    """
    order = Order.read(content)
    rates, options = _rates(order), json.loads(order.options)
    params = _federated(module, optimizer)
    like = {
        name: jax.ShapeDtypeStruct(w.shape, jax.dtypes.canonicalize_dtype(DTYPES[w.dtype]))
        for name, w in params.items()
    }
    message, momentum = content.array_records["message"], {}
    if order.algorithm == "fedavg":
        weights = unpack(message, like)
    elif options.get("sends") == "model":
        weights, _ = unpack(message, fedda.Message(like))
    else:
        weights, momentum = unpack(message, fedda.Message(like, like))
    load(module, weights)
    for group in optimizer.param_groups:
        group.update(rates)
    optimizer.start({params[name]: to_tensor(array) for name, array in momentum.items()})
    return order


def end_round(
    order: Order,
    context: Context,
    module: Module,
    optimizer: DecoupledSGD,
    examples: int,
    loss: float,
    visited: int,
) -> RecordDict:
    """Return the reply to the server after local training.

    Args:
        order: The order that `begin_round` returned.
        context: The Flower context of the node.
        module: The trained module.
        optimizer: The optimiser of `begin_round`.
        examples: The number of the client's examples. It is the weight of the upload.
        loss: The sum of the training losses over all processed examples, which the server reports.
        visited: The number of processed examples. An example counts once for each epoch.

    Returns:
        The content of the reply.

    Raises:
        InputError: The client has no examples, or a rate of the optimiser changed in the round.
    """
    params, rates = _federated(module, optimizer), _rates(order)
    for group in optimizer.param_groups:
        for name, expected in rates.items():
            if group[name] != expected:
                raise InputError(
                    f"{name} of DecoupledSGD must stay {expected:g} during the round, as the "
                    f"server set it, got {group[name]:g}. Remove the scheduler that changes it."
                )
    if examples < 1:
        raise InputError(f"a client must have at least one example, got examples={examples}.")
    upload = weighted_by(jnp.asarray(float(examples)), _upload(order, params, optimizer))
    return build_reply(order, context, upload, loss, visited)


@torch.no_grad()
def _upload(order: Order, params: Mapping[str, Parameter], optimizer: DecoupledSGD) -> PyTree:
    """Return the upload of a JAX client, without its weight."""
    states = {name: optimizer.state[w] for name, w in params.items()}
    if order.algorithm == "fedavg":
        return {name: to_array(w - states[name]["start"]) for name, w in params.items()}
    options, dtype = json.loads(order.options), jnp.result_type(float)
    steps = np.asarray(next(iter(states.values()))["step"], dtype)
    decay = np.asarray(optimizer.param_groups[0]["beta1"] ** steps, dtype)
    counted = options.get("bias") == "steps"
    return fedda.Upload(
        gradients={name: to_array(state["sum"]) for name, state in states.items()},
        momentum={name: to_array(state["momentum"]) for name, state in states.items()},
        steps=Counter(steps if counted else ()),
        decay=Counter(decay if counted or options.get("sends") == "model" else ()),
    )


def _rates(order: Order) -> dict[str, float]:
    """Return the optimiser's settings from the server's order. FedAvg has no momentum."""
    if order.algorithm not in ALGORITHMS:
        raise InputError(
            f"the server runs {order.algorithm!r}, but PyTorch clients support only "
            f"{', '.join(ALGORITHMS)}. Change the server's algorithm, or use JAX clients "
            "(fedda.flower.client_app), which support all algorithms."
        )
    options = json.loads(order.options)
    if options.get("beta1_per") == "round":
        raise InputError(
            "the server has beta1_per=round, but DecoupledSGD takes beta1 per local step. Use "
            "beta1_per=step with beta1 ** (1 / steps) on the server, or JAX clients "
            "(fedda.flower.client_app)."
        )
    algorithm = algorithms.get(order.algorithm, **options)
    hp = algorithms.hyper(order.algorithm, algorithm, order.hyper)
    return {"lr": hp.client_lr, "beta1": getattr(hp, "beta1", 0.0), "mu": getattr(hp, "mu", 0.0)}


def _federated(module: Module, optimizer: DecoupledSGD) -> dict[str, Parameter]:
    """Return the parameters of the module, after a check that the optimiser has all of them."""
    params = parameters(module)
    missing = [name for name, w in params.items() if w not in optimizer.state]
    if missing:
        raise InputError(
            f"DecoupledSGD must have all parameters of the module, but lacks {len(missing)}, for "
            f"example {missing[0]}. Create it with DecoupledSGD(module.parameters())."
        )
    return params


# --------------------------------------------------------------------------------- the client


def client_app(
    module: Module,
    loss: Callable[[Any, Any], Any],
    data: Callable[[Context], DataLoader[Any]],
    local_work: int = 5,
    local_unit: Literal["steps", "epochs"] = "steps",
    mods: list[Mod] | None = None,
) -> ClientApp:
    """Return a Flower client that trains a PyTorch module with FedDA or FedAvg.

    The random numbers of a round depend only on the server's seed, the round and the client.

    Args:
        module: The module to train.
        loss: `(outputs, y) -> loss`, the mean over a batch or one number for each example.
        data: `(context) -> loader`, returns a `DataLoader` of batches `(x, y)` for the Flower
            context of a node. It is called once for each client of a process.
        local_work: The number of steps or epochs in a round. Every round starts at the beginning of
            the loader.
        local_unit: Whether `local_work` counts `"steps"` or `"epochs"`.
        mods: Flower mods, such as `fedda.flower.secure_mods()`.

    Returns:
        The client app, for Flower's `flower-supernode` or its simulation.

    Raises:
        InputError: The module cannot be used (see `parameters`), or the local work is not valid.

    Example:
        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> import fedda.torch
        >>> def data(context):
        ...     x, y = torch.randn(100, 8), torch.randint(0, 3, (100,))
        ...     return DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
        >>> module = torch.nn.Linear(8, 3)
        >>> app = fedda.torch.client_app(module, torch.nn.functional.cross_entropy, data)
    """
    parameters(module)
    if local_unit not in ("steps", "epochs"):
        raise unknown("value of local_unit", local_unit, ("steps", "epochs"))
    check_whole_number("local_work", local_work, least=1)
    optimizer = DecoupledSGD(module.parameters())
    one_at_a_time = threading.Lock()  # because all clients of a process share the module

    def train(loader: DataLoader[Any], content: RecordDict, context: Context) -> RecordDict:
        examples = _count(loader)
        steps = local_work * (len(loader) if local_unit == "epochs" else 1)
        batches = islice(chain.from_iterable(repeat(loader)), steps)
        with one_at_a_time:
            order = begin_round(content, module, optimizer)
            with _seeded(order, context, module), _unchanged_buffers(module):
                module.train()
                if order.full:
                    seen = _train(module, loss, optimizer, loader, one_step_of=examples)
                else:
                    seen = _train(module, loss, optimizer, batches)
            return end_round(order, context, module, optimizer, examples=examples, **seen)

    return build_app(lambda context: _check_loader(data(context)), train, ALGORITHMS, mods)


def _check_loader(loader: Any) -> DataLoader[Any]:
    if not isinstance(loader, DataLoader):
        raise InputError(f"data must return a DataLoader, got {type(loader).__name__}.")
    if loader.batch_size is None or loader.drop_last or not hasattr(loader.sampler, "__len__"):
        raise InputError(
            "the DataLoader must have a batch_size, a dataset with a length, and no drop_last: the "
            "number of examples is the client's weight, and a full-batch step uses all of them."
        )
    if not _count(loader):
        raise InputError("the DataLoader must have at least one example, got none.")
    return loader


def _count(loader: DataLoader[Any]) -> int:
    """Return the number of examples in an epoch. A sampler may use only part of the dataset."""
    return len(cast(Sized, loader.sampler))


def _train(
    module: Module,
    loss: Callable[[Any, Any], Any],
    optimizer: DecoupledSGD,
    batches: Iterable[Any],
    one_step_of: int = 0,
) -> dict[str, Any]:
    """Take one step on each batch, or one step with the mean gradient of all batches.

    Args:
        module: The module to train.
        loss: The loss of a batch.
        optimizer: The optimiser.
        batches: The batches `(x, y)`.
        one_step_of: The total number of examples if a single step is taken, else 0.

    Returns:
        The sum of the losses of the processed examples, and their number, for `end_round`.
    """
    device = next(module.parameters()).device
    total, visited = torch.zeros(()), 0
    optimizer.zero_grad()
    for batch in batches:
        if [isinstance(part, Tensor) for part in batch] != [True, True]:
            raise InputError(
                f"a batch must be a pair (x, y) of tensors, got a {type(batch).__name__} of length "
                f"{len(batch)}. Change collate_fn, or use begin_round and end_round in a loop."
            )
        x, y = (part.to(device) for part in batch)
        mean = loss(module(x), y).mean()
        (mean * (len(y) / one_step_of) if one_step_of else mean).backward()
        if not one_step_of:
            optimizer.step()
            optimizer.zero_grad()
        total, visited = total + len(y) * mean.detach(), visited + len(y)
    if one_step_of:
        optimizer.step()
    return {"loss": float(total), "visited": visited}


@contextmanager
def _seeded(order: Order, context: Context, module: Module) -> Iterator[None]:
    """Seed PyTorch from the round and the client, and restore its state afterwards."""
    high, low = random.key_data(random.fold_in(order.key(), partition(context))).tolist()
    gpus = {w.device.index for w in module.parameters() if w.is_cuda}
    with torch.random.fork_rng(devices=sorted(gpus)):
        torch.manual_seed((high << 32) | low)
        yield


@contextmanager
def _unchanged_buffers(module: Module) -> Iterator[None]:
    """Raise an `InputError` if training changes a floating-point buffer, which is not sent."""

    def floating() -> dict[str, Tensor]:
        return {name: b.clone() for name, b in module.named_buffers() if b.is_floating_point()}

    before = floating()
    yield
    for name, buffer in floating().items():
        if not torch.equal(buffer, before[name]):
            raise private_buffer(f"training changes the buffer {name!r}")
