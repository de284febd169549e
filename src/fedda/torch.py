"""FedDA for clients that train a PyTorch module.

A client of FedDA runs plain SGD and, beside it, accumulates a momentum that its steps do not use:
`DecoupledSGD` does both, and the loop around it stays as it is. `client_app` is a whole Flower
client for a module and its `DataLoader`; `begin_round` and `end_round` do the same for a loop of
your own. What is sent is what JAX clients send, so both kinds can serve in one federation. The
parameters of a module are to the server a flat dictionary from their names to arrays.
"""

import json
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice, repeat
from numbers import Real
from typing import Any, Literal, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import Mod
from jax import random
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.data import DataLoader

from fedda import algorithms, tree
from fedda.algorithms import fedda
from fedda.core import Decay, NonNegative, Positive
from fedda.data.shards import num_rows
from fedda.errors import InputError, unknown
from fedda.flower import wire
from fedda.flower.client import partition
from fedda.local import Weighted
from fedda.models import Model
from fedda.task import Plan, Task
from fedda.tree import PyTree

ALGORITHMS = ("fedavg", "fedda-adagrad", "fedda-adam", "fedda-sgdm")
DTYPES = {torch.bfloat16: jnp.bfloat16, torch.float32: jnp.float32, torch.float64: jnp.float64}

# ----------------------------------------------------------------------------- the optimiser

_DOMAINS = {
    name: get_args(kind)[1]
    for name, kind in (("lr", Positive), ("beta1", Decay), ("mu", NonNegative))
}


class DecoupledSGD(torch.optim.Optimizer):
    """SGD that also accumulates the decoupled momentum of FedDA.

        g = gradient + mu (w - W)
        w <- w - lr g                        the momentum is not used here
        m <- beta1 m + (1 - beta1) g

    W is where the parameters are when a round starts, which is when they are given to the optimiser
    or when `start` is called; there m is the server's momentum, or 0. A parameter without a
    gradient has a gradient of 0. In a federation lr, beta1 and mu are the server's: `begin_round`
    sets them.
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.1, beta1: float = 0.9, mu: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "beta1": beta1, "mu": mu})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters; for them the round starts now."""
        for name, domain in _DOMAINS.items():
            value = param_group.get(name, self.defaults[name])
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not domain.allows(value):
                raise InputError(f"{name} of DecoupledSGD must be {domain.words}, got {value!r}.")
        super().add_param_group(param_group)
        self._start(self.param_groups[-1]["params"], {})

    def start(self, momentum: Mapping[Tensor, Tensor] | None = None) -> None:
        """Starts a round where the parameters are now, with the server's momentum of each, or 0."""
        for group in self.param_groups:
            self._start(group["params"], momentum or {})

    @torch.no_grad()
    def _start(self, params: Iterable[Tensor], momentum: Mapping[Tensor, Tensor]) -> None:
        for w in params:
            m = torch.zeros_like(w)
            if w in momentum:
                m.copy_(momentum[w])
            # A tensor for each parameter, as in PyTorch's own optimisers: a compiled step would be
            # compiled anew for every value of a number.
            self.state[w] = {"start": w.detach().clone(), "momentum": m, "step": torch.zeros(())}

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step; a `closure` computes loss and gradients anew, and its loss is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step(group)
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        params, beta1, mu = group["params"], group["beta1"], group["mu"]
        states = [self.state[w] for w in params]
        starts, momenta, counts = (
            [state[name] for state in states] for name in ("start", "momentum", "step")
        )
        gradients: Any = [
            torch.zeros_like(w) if w.grad is None else w.grad.to_dense() for w in params
        ]
        if mu:
            pulls = torch._foreach_sub(params, starts)
            gradients = torch._foreach_add(gradients, pulls, alpha=mu)
        torch._foreach_add_(params, gradients, alpha=-group["lr"])
        torch._foreach_mul_(momenta, beta1)
        torch._foreach_add_(momenta, gradients, alpha=1 - beta1)
        torch._foreach_add_(counts, 1)


# --------------------------------------------------------------------------------- the module


def parameters(module: Module) -> dict[str, Parameter]:
    """The parameters of a module by their names, if it is one that can be federated."""
    if not isinstance(module, Module):
        raise InputError(f"module must be a torch.nn.Module, got {type(module).__name__}.")
    module = getattr(module, "_orig_mod", module)  # what torch.compile has wrapped
    found = dict(module.named_parameters())
    if not found:
        raise InputError("the module must have parameters, got none.")
    for name, parameter in found.items():
        if parameter.dtype not in DTYPES:
            raise InputError(
                "the parameters must be of float32, float64 or bfloat16 (float16 overflows in "
                f"sums over clients), got {parameter.dtype} in {name}. Convert the module, for "
                "instance by module.float()."
            )
    for name, part in module.named_modules():
        if getattr(part, "track_running_stats", False):
            raise _private_buffer(f"{type(part).__name__} {name!r} keeps running statistics")
    return found


def _private_buffer(what: str) -> InputError:
    return InputError(
        f"{what}, but a federated model is its parameters alone: such a buffer would stay with the "
        "client. Use layers that keep none, such as GroupNorm or LayerNorm in place of BatchNorm."
    )


def load(module: Module, params: Mapping[str, Any]) -> None:
    """Gives a module the parameters of a server's state."""
    own = parameters(module)
    if own.keys() != params.keys():
        odd = sorted(own.keys() ^ params.keys())[0]
        raise InputError(
            f"the module has {len(own)} parameters, got {len(params)} arrays with other names, "
            f"{odd} among them. Build the module as on the server."
        )
    for name, parameter in own.items():
        if parameter.shape != params[name].shape:
            raise InputError(
                f"{name} has shape {tuple(parameter.shape)} in the module, got an array of shape "
                f"{tuple(params[name].shape)}. Build the module as on the server."
            )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(_tensor(params[name]))


def model(module: Module) -> Model:
    """The module for the server: its parameters now are those of the first round.

    The server does not compute with it. What asks `apply` for the shapes of uploads is answered;
    what asks for numbers, as an evaluation does, is refused.
    """
    initial = {name: _array(parameter) for name, parameter in parameters(module).items()}

    def refuse() -> np.ndarray:
        raise InputError(
            "a server does not compute with a PyTorch module, so it cannot evaluate one: leave "
            "test out, and give evaluate, which may load the parameters with fedda.torch.load."
        )

    def apply(params: PyTree, x: Any) -> Any:
        like = jax.ShapeDtypeStruct((num_rows(x),), jnp.result_type(float))
        return jax.pure_callback(refuse, like)

    return Model(lambda key: jax.tree.map(jnp.asarray, initial), apply)


def task(module: Module) -> Task:
    """What the `Settings` of a server need of a module; the clients know all else."""
    return Task(model(module), _outputs, Plan(1))


def _outputs(outputs: Any, y: Any) -> Any:
    return outputs


def _array(tensor: Tensor) -> np.ndarray:
    """A copy as NumPy has it, or as JAX's NumPy has bfloat16; float64 only where JAX has that."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        return np.array(tensor.view(torch.uint16).numpy().view(jnp.bfloat16))
    return np.array(tensor.numpy(), jax.dtypes.canonicalize_dtype(tensor.numpy().dtype))


def _tensor(array: Any) -> Tensor:
    array = np.asarray(array)
    if array.dtype == jnp.bfloat16:
        return torch.tensor(array.view(np.uint16)).view(torch.bfloat16)
    return torch.tensor(array)


# ---------------------------------------------------------------------------------- one round


def begin_round(content: RecordDict, module: Module, optimizer: DecoupledSGD) -> wire.Order:
    """Gives the module and the optimiser what the server sent; returns what the server asks for.

    If the order is `full`, that is one step with the mean gradient of all examples.
    """
    order = wire.Order.read(content)
    settings = _settings(order)
    own = _federated(module, optimizer)
    like = {
        name: jax.ShapeDtypeStruct(w.shape, jax.dtypes.canonicalize_dtype(DTYPES[w.dtype]))
        for name, w in own.items()
    }
    sent, momentum = content.array_records["message"], {}
    if order.algorithm == "fedavg":
        params = wire.unpack(sent, like)
    elif _options(order).get("sends") == "model":
        params, _ = wire.unpack(sent, fedda.Message(like))
    else:
        params, momentum = wire.unpack(sent, fedda.Message(like, like))
    load(module, params)
    for group in optimizer.param_groups:
        group.update(settings)
    optimizer.start({own[name]: _tensor(array) for name, array in momentum.items()})
    return order


def end_round(
    order: wire.Order,
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
            "upload": wire.pack(Weighted(tree.scale(weight, upload), weight)),
            "seen": MetricRecord({"loss": float(loss), "examples": float(visited)}),
        }
    )


@torch.no_grad()
def _upload(
    order: wire.Order,
    optimizer: DecoupledSGD,
    own: Mapping[str, Parameter],
    settings: Mapping[str, float],
) -> PyTree:
    """What a JAX client would upload, without its weight."""
    states = {name: optimizer.state[w] for name, w in own.items()}
    moved = {name: states[name]["start"] - w for name, w in own.items()}
    if order.algorithm == "fedavg":
        return {name: _array(-change) for name, change in moved.items()}
    gradients = {name: _array(change / settings["lr"]) for name, change in moved.items()}
    momentum = {name: _array(state["momentum"]) for name, state in states.items()}
    options, dtype = _options(order), jnp.result_type(float)
    steps = np.asarray(states[next(iter(own))]["step"], dtype)
    decay = np.asarray(settings["beta1"] ** steps, dtype)
    counted = options.get("bias") == "steps"
    known = counted or options.get("sends") == "model"
    return fedda.Upload(gradients, momentum, steps if counted else (), decay if known else ())


def _options(order: wire.Order) -> dict[str, Any]:
    return dict(json.loads(order.options))


def _settings(order: wire.Order) -> dict[str, float]:
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


def introduce(context: Context, examples: int) -> RecordDict:
    """The reply to the server's query who a client is and how many examples it has."""
    about = ConfigRecord({"partition": partition(context), "examples": examples})
    return RecordDict({"fedda": about})


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
    if isinstance(local_work, bool) or not isinstance(local_work, int) or local_work < 1:
        raise InputError(f"local_work must be a whole number of at least 1, got {local_work!r}.")
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
    return len(loader.sampler)  # type: ignore[arg-type]


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
def _seeded(order: wire.Order, context: Context, module: Module) -> Iterator[None]:
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
            raise _private_buffer(f"training changes the buffer {name!r}")
