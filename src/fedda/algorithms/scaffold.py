"""SCAFFOLD (Karimireddy et al., ICML 2020): every local step is corrected for the client's drift.

    client i:    y = W;  for each of its K_i local steps:
                     y <- y - client_lr * (g_i(y; batch) - c_i + c)
    control II:  c_i+ = the mean of the K_i gradients g_i(y; batch)
    control I:   c_i+ = the gradient of all its examples at W, one more pass over them
    client i:    upload  N_i (y - W),  N_i,  N_i (c_i+ - c_i) / clients,  1
                 c_i <- c_i+
    server:      W <- W + server_lr * sum_i N_i (y_i - W) / sum_i N_i
                 C <- C + sum_i N_i (c_i+ - c_i) / clients
                 sends c = C / (the mean N_i of all uploads so far)

`clients` is the size of the whole population. All `c_i` and `C` start at 0. So `C` is the mean of
`N_i c_i` over all clients, visited or not, and `c` is the mean of the `c_i` weighted by `N_i`.
While some clients have not been visited, the divisor of `c` is an estimate.

The fixed point: no client moves if `c_i = g_i(W)` and `c = 0`, whatever the divisor. Then
`C = 0`, that is `sum_i N_i g_i(W) = 0`: `W` is a minimum of the federation's loss, in which every
example counts once. This needs the same weights for the moves and for the `c_i`. With moves
weighted by `N_i` and a plain mean of the `c_i`, the plain mean of the clients' gradients would be
0 instead.

With ``reduction="sum"``, `g_i(y; batch)` is `b` times a mean for a batch of `b` examples. Then
`c_i` and `c` are those of a whole mini-batch, `B` times a mean; a step takes `b / B` of them, and
II divides the sum of the `K_i` gradients by the sum of `b / B`. The paper prints II as
`c_i+ = c_i - c + (W - y) / (K_i client_lr)`, which is the same number, with cancellation.

A client keeps its `c_i` until its next visit. If its local steps diverge once, the large `c_i` is
subtracted from all its steps of the next visit, which can ruin the model. So SCAFFOLD needs a lower
``client_lr`` than FedAvg, especially if clients are visited rarely.

Options:
    control    II or I, as above. The paper finds I more stable at times and II cheaper, and uses
               II in all its experiments (its section 4).
    weighting  examples: as above. uniform: 1 in place of `N_i` everywhere, as in the paper (its
               algorithm 1), whose objective is the plain mean of the clients' losses.

Weighting: by the number of examples. The server keeps `W` and `C`; client i keeps `c_i`, one
model, until its next visit.
Communication, in models: 2 down, 2 up.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedda.algorithms.registry import Variant
from fedda.core import local, tree
from fedda.core.algorithm import Algorithm, Phase, Positive, Seen
from fedda.core.task import Batch, Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard

Control = Literal["II", "I"]
Weighting = Literal["examples", "uniform"]


class Hyper(NamedTuple):
    client_lr: Positive = 0.1
    server_lr: Positive = 1.0


class State(NamedTuple):
    params: PyTree
    control: PyTree  # C
    weight: Array  # the sum of the weights of all uploads so far
    uploads: Array  # their number


class Message(NamedTuple):
    params: PyTree
    control: PyTree  # c


class Change(NamedTuple):
    moved: PyTree  # y - W
    control: PyTree  # (c_i+ - c_i) / (number of clients)


class Upload(NamedTuple):
    change: local.Weighted
    clients: local.Counter  # 1


def init(hp: Hyper, params: PyTree) -> State:
    return State(params, tree.zeros_like(params), jnp.zeros(()), jnp.zeros(()))


def memory(hp: Hyper, params: PyTree) -> PyTree:
    """Return c_i, which has the shape of the model."""
    return tree.zeros_like(params)


def send(hp: Hyper, state: State) -> Message:
    # Before the first upload both sums are 0, and so is C.
    mean_weight = jnp.where(state.uploads > 0, state.weight / jnp.maximum(state.uploads, 1), 1)
    return Message(state.params, tree.scale(1 / mean_weight, state.control))


def work(
    hp: Hyper,
    task: Task,
    server: Message,
    own: PyTree,
    shard: Shard,
    key: Array,
    control: Control,
    weighting: Weighting,
) -> tuple[Upload, PyTree, Seen]:
    correction = tree.sub(server.control, own)

    def step(
        carry: tuple[PyTree, PyTree, Array], batch: Batch
    ) -> tuple[tuple[PyTree, PyTree, Array], Seen]:
        y, total, shares = carry
        gradient, seen = task.gradient(y, batch)
        share = task.batch_share(batch)
        y = tree.axpy(-hp.client_lr, tree.axpy(share, correction, gradient), y)
        return (y, tree.add(total, gradient), shares + share), seen

    start = (server.params, tree.zeros_like(own), jnp.zeros(()))
    (y, total, shares), seen = local.steps(step, start, task.batches(shard, key))
    if control == "II":
        new = tree.scale(1 / jnp.where(shares > 0, shares, 1), total)  # 0 steps without examples
    else:
        new = task.full_gradient(server.params, shard, key)
    one = jnp.ones(())
    weight = shard.count.astype(one.dtype) if weighting == "examples" else one
    control_change = tree.scale(1 / shard.num_clients, tree.widen(tree.sub(new, own)))
    change = Change(tree.sub(y, server.params), control_change)
    return Upload(local.weighted_by(weight, change), local.Counter(one)), new, seen


def merge(hp: Hyper, state: State, total: Upload) -> State:
    return State(
        tree.axpy(hp.server_lr, local.mean(total.change).moved, state.params),
        tree.add(state.control, total.change.sum.control),  # a sum over all rounds, not a mean
        state.weight + total.change.weight,
        state.uploads + total.clients.value,
    )


def make(control: Control = "II", weighting: Weighting = "examples") -> Algorithm:
    """SCAFFOLD (Karimireddy et al. 2020): control variates cancel the drift of local steps."""
    chosen = partial(work, control=control, weighting=weighting)
    return Algorithm(Hyper=Hyper, init=init, memory=memory, phases=(Phase(send, chosen, merge),))


variants = {
    "scaffold": Variant(
        make,
        "SCAFFOLD",
        "Karimireddy et al. 2020",
        "control variates",
        down=2,
        up=2,
        unbiased=True,
        version=2,  # control variates are weighted as the updates are
    )
}
