"""CLIMB (Shen et al., ICLR 2022): FedAvg that gives more weight to clients with a high loss.

It minimises the mean of the clients' losses `f_i` under the constraint that no `f_i` exceeds that
mean by more than `eps`. Client i keeps a multiplier `lambda_i`, at first 0, which grows while its
loss breaks the constraint:

    server:    sends W and L, the mean of all lambda_j, also of clients not yet visited
    client i:  l_i = its mean loss at W, on all its examples, in training mode
               y = W;  y <- y - client_lr * g_i(y; batch)    for every local step
               w_i = max(0, 1 + lambda_i - L)
               upload  p_i w_i (y - W),  p_i,  l_i,  1
    server:    W <- W + server_lr * sum_i p_i w_i (y_i - W) / sum_i p_i
               sends l = sum_i l_i / sum_i 1
    client i:  c_i = clip(lambda_i + (dual_lr / clients) (l_i - l - eps), 0, 100) - lambda_i
               lambda_i <- lambda_i + c_i
               upload  c_i / clients
    server:    L <- L + sum_i c_i / clients

`clients` is the size of the whole population. The multipliers follow the losses at this round's
`W` and change the weights from the next round on. The divisor has no `w_i`, so the weights of a
cohort do not sum to 1, and the length of a step depends on which clients are drawn. `eps` has the
units of the loss, and its published default of 1 is large: if all losses are below 1, every
multiplier stays 0.

The authors' code measures the losses of all clients in every fifth round. Here the cohort measures
its losses in every round, and their mean is an estimate of the mean over all clients. The lower
bound of 0 for `w_i` is our addition: with a negative `w_i`, `W` would move in the direction
opposite to the client's update.

Option:
    weighting  examples: `p_i = N_i`. uniform: `p_i = 1`, as in the authors' code.

Weighting: by the number of examples, times `w_i`. Client i keeps `lambda_i` (and `l_i` during a
round); the server keeps `W`, `L` and `l`. The second exchange is one number each way.
Communication, in models: 1 down, 1 up.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedda.algorithms import fedavg
from fedda.algorithms.registry import Reduction, Variant
from fedda.core import local, tree
from fedda.core.algorithm import Algorithm, NonNegative, Phase, Positive, Seen, nothing_seen
from fedda.core.task import Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard

LARGEST = 100.0  # multiplier


class Hyper(NamedTuple):
    client_lr: Positive = 0.1
    server_lr: Positive = 1.0
    dual_lr: NonNegative = 1.0
    eps: NonNegative = 1.0


class State(NamedTuple):
    params: PyTree
    mean_multiplier: Array  # L
    mean_loss: Array  # l, of the last cohort


class Memory(NamedTuple):
    multiplier: Array  # lambda_i
    loss: Array  # l_i
    measured: Array  # 1 between the two exchanges of a round, else 0: whether l_i is of this round


class Message(NamedTuple):
    params: PyTree
    mean_multiplier: Array


class Upload(NamedTuple):
    moved: local.Weighted
    loss: local.Weighted


def init(hp: Hyper, params: PyTree) -> State:
    return State(params, jnp.zeros(()), jnp.zeros(()))


def memory(hp: Hyper, params: PyTree) -> Memory:
    return Memory(jnp.zeros(()), jnp.zeros(()), jnp.zeros(()))


def send_model(hp: Hyper, state: State) -> Message:
    return Message(state.params, state.mean_multiplier)


def train(
    weighting: str,
    hp: Hyper,
    task: Task,
    message: Message,
    memory: Memory,
    shard: Shard,
    key: Array,
) -> tuple[Upload, Memory, Seen]:
    one = jnp.ones(())
    loss = task.mean_loss(message.params, task.whole(shard, key))
    local_sgd = fedavg.Hyper(hp.client_lr)
    (moved, p), _, seen = fedavg.work(local_sgd, task, message.params, (), shard, key)
    if weighting == "uniform":
        moved, p = tree.scale(1 / p, moved), one
    w = jnp.maximum(0, 1 + memory.multiplier - message.mean_multiplier)
    upload = Upload(local.Weighted(tree.scale(w, moved), p), local.Weighted(loss, one))
    return upload, Memory(memory.multiplier, loss, one), seen


def merge_models(hp: Hyper, state: State, total: Upload) -> State:
    params = tree.axpy(hp.server_lr, local.mean(total.moved), state.params)
    return State(params, state.mean_multiplier, local.mean(total.loss))


def send_loss(hp: Hyper, state: State) -> Array:
    return state.mean_loss


def update_multiplier(
    hp: Hyper, task: Task, mean_loss: Array, memory: Memory, shard: Shard, key: Array
) -> tuple[Array, Memory, Seen]:
    # A client that was lost in the first exchange has no loss of this round. NaN makes its upload
    # invalid. On Flower, it may still have the loss of an earlier round, which must not be used.
    loss = jnp.where(memory.measured > 0, memory.loss, jnp.nan)
    ascent = hp.dual_lr / shard.num_clients * (loss - mean_loss - hp.eps)
    multiplier = jnp.clip(memory.multiplier + ascent, 0, LARGEST)
    change = (multiplier - memory.multiplier) / shard.num_clients
    return change, Memory(multiplier, jnp.zeros(()), jnp.zeros(())), nothing_seen()


def merge_multipliers(hp: Hyper, state: State, change: Array) -> State:
    return state._replace(mean_multiplier=state.mean_multiplier + change)


def make(weighting: Literal["examples", "uniform"] = "examples") -> Algorithm:
    """CLIMB (Shen et al. 2022): clients whose loss exceeds the mean weigh more."""
    phases = (
        Phase(send_model, partial(train, weighting), merge_models),
        Phase(send_loss, update_multiplier, merge_multipliers),
    )
    return Algorithm(Hyper=Hyper, init=init, memory=memory, phases=phases)


variants = {
    "climb": Variant(
        make, "CLIMB", "Shen et al. 2022", "clients with a high loss weigh more", down=1, up=1
    )
}
reductions = [Reduction("climb", {"dual_lr": 0.0}, "fedavg")]
