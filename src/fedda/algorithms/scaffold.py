"""SCAFFOLD (Karimireddy et al., ICML 2020): every local step is corrected for the client's drift.

    client i:  y = W;  for each of its K_i local steps:
                   y <- y - client_lr * (g_i(y; batch) - c_i + c)
               II: c_i+ = the mean of the K_i gradients g_i(y; batch)
               I:  c_i+ = the gradient of all its examples at W, one more pass over them
               upload  N_i (y - W),  N_i,  (c_i+ - c_i) / (number of clients)
               c_i <- c_i+
    server:    W <- W + server_lr * sum_i N_i (y_i - W) / sum_i N_i
               c <- c + sum_i (c_i+ - c_i) / (number of clients)

All c begin at 0, and c is always the mean of the c_i of all clients, whether visited or not. II is
printed as c_i+ = c_i - c + (W - y) / (K_i client_lr); that is the same number, with cancellation.

Options:
    control    II or I, as above. The paper finds I at times more stable and II cheaper, and uses
               II in all its experiments (its section 4).
    weighting  examples: as above. uniform: 1 in place of N_i, so W moves by the plain mean, as in
               the paper (its algorithm 1).

Weighting: the moves by the number of examples, c by nothing. So under both weightings it comes to
rest where the *unweighted* mean of the clients' gradients is 0, however many examples each has.
The server keeps W and c; client i keeps c_i, one model, which waits for its next visit.
Communication, in models: 2 down, 2 up.
"""

from functools import partial
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedda import local, tree
from fedda.core import Algorithm, Phase, Positive, Seen
from fedda.data.shards import Shard
from fedda.task import Batch, Task
from fedda.tree import PyTree

Control = Literal["II", "I"]
Weighting = Literal["examples", "uniform"]


class Hyper(NamedTuple):
    client_lr: Positive = 0.1
    server_lr: Positive = 1.0


class State(NamedTuple):
    params: PyTree
    control: PyTree  # c


class Upload(NamedTuple):
    moved: local.Weighted
    control: PyTree  # the client's part of the change of c


def init(hp: Hyper, params: PyTree) -> State:
    return State(params, tree.zeros_like(params))


def memory(hp: Hyper, params: PyTree) -> PyTree:
    """c_i, which has the shape of the model, not its values."""
    return tree.zeros_like(params)


def send(hp: Hyper, state: State) -> State:
    return state


def work(
    hp: Hyper,
    task: Task,
    server: State,
    own: PyTree,
    shard: Shard,
    key: Array,
    control: Control,
    weighting: Weighting,
) -> tuple[Upload, PyTree, Seen]:
    correction = tree.sub(server.control, own)

    def step(carry: tuple[PyTree, PyTree], batch: Batch) -> tuple[tuple[PyTree, PyTree], Seen]:
        y, total = carry
        gradient, seen = task.gradient(y, batch)
        y = tree.axpy(-hp.client_lr, tree.add(gradient, correction), y)
        return (y, tree.add(total, gradient)), seen

    batches = task.batches(shard, key)
    start = (server.params, tree.zeros_like(own))
    (y, total), seen = local.steps(step, start, batches)
    if control == "II":
        steps = jnp.asarray(batches.steps, jnp.result_type(float))
        new = tree.scale(1 / jnp.maximum(steps, 1), total)  # an empty client takes none
    else:
        new = local.full_gradient(task, server.params, shard, key)
    moved = tree.sub(y, server.params)
    upload = Upload(
        local.weighted(shard, moved)
        if weighting == "examples"
        else local.Weighted(moved, jnp.ones(())),
        tree.scale(1 / shard.num_clients, tree.sub(new, own)),
    )
    return upload, new, seen


def merge(hp: Hyper, state: State, total: Upload) -> State:
    return State(
        tree.axpy(hp.server_lr, local.mean(total.moved), state.params),
        tree.add(state.control, total.control),
    )


def make(control: Control = "II", weighting: Weighting = "examples") -> Algorithm:
    """SCAFFOLD (Karimireddy et al. 2020): control variates cancel the drift of local steps."""
    chosen = partial(work, control=control, weighting=weighting)
    return Algorithm(Hyper, init, memory, (Phase(send, chosen, merge),))


variants = {"scaffold": make}
