"""FedLin (Mitra et al., NeurIPS 2021): local steps along the cohort's gradient, not the client's.

A round has two exchanges, with the same clients. f_i is the mean loss of all examples of client i.

    A client i:  h = grad f_i(W);  upload  N_i h,  N_i
      server:    G = sum_i N_i h_i / sum_i N_i
    B client i:  y = W;  y <- y - e * (g_i(y; batch) - grad f_i(W) + G)    for every local step
                 upload  N_i (y - W),  N_i
      server:    W <- W + server_lr * sum_i N_i (y_i - W) / sum_i N_i

Under the reduction `sum`, g_i(y; batch) is b times a mean for a batch of b examples. There h, grad
f_i(W) and G are those of a whole mini-batch, B times a mean, and a step takes b / B of them.

At y = W the step is that of G, so the round of clients with one full-batch step each is a step of
gradient descent on the cohort's loss. Client i computes grad f_i(W) in A and again in B, so that it
need not keep it; a model with dropout draws its noise anew. In the paper all clients take part, the
mean is plain and server_lr is 1 (so WilliamYi96/VR-ProxSkip, main_0002.py, and zuangwang/fedrecu,
trainers.py, read it); from memory of the paper, unchecked: batches are full, and e tau_i is the
same for all clients, where tau_i is the number of local steps. A cohort that is a sample, mini-
batches and N_i make it fit for many clients.

Options:
    rate         step: e = client_lr. total: e = client_lr / tau_i.
    same_batch   no: as above. yes: g_i(W; batch) in place of grad f_i(W), on the very batch (and
                 with the very noise) of g_i(y; batch), as in SVRG: less variance, two gradients a
                 step.
    server_topk  on: the server sends G' = C(E + G) in place of G and keeps E <- E + G - G'.
    client_topk  on: client i sends h' = C(R_i + h) in place of h and keeps R_i <- R_i + h - h';
                 its own steps use the exact grad f_i(W).
C keeps those ceil(d / delta) of all d entries that are largest in magnitude and makes the others 0;
delta is server_delta or client_delta, and 1 keeps everything. E and R_i begin at 0. By its abstract
the paper sparsifies gradients; how, as told here, is from memory of it, unchecked. Messages are
counted as if the zeros were sent. At a minimum G is 0 but h_i is not: server_topk can come to rest
there, client_topk circles around it, at a distance that shrinks with client_lr.

Weighting: by the number of examples. The server keeps W (G only within a round, and E); clients
keep nothing, but R_i, one model, with client_topk.
Communication, in models: 3 down, 2 up. W goes down in A and in B, which a client that keeps it in
between could save.
"""

from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedda.algorithms import Reduction
from fedda.core import local, tree
from fedda.core.algorithm import Algorithm, Domain, Phase, Positive, Seen, nothing_seen
from fedda.core.task import Batch, Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard

Rate = Literal["step", "total"]
Choice = Literal["no", "yes"]
Switch = Literal["off", "on"]
Compression = Annotated[float, Domain("a number of at least 1", lambda value: value >= 1)]


class Hyper(NamedTuple):
    client_lr: Positive = 0.1
    server_lr: Positive = 1.0


class ServerTopK(NamedTuple):
    client_lr: Positive = 0.1
    server_lr: Positive = 1.0
    server_delta: Compression = 10.0


class ClientTopK(NamedTuple):
    client_lr: Positive = 0.1
    server_lr: Positive = 1.0
    client_delta: Compression = 10.0


class BothTopK(NamedTuple):
    client_lr: Positive = 0.1
    server_lr: Positive = 1.0
    server_delta: Compression = 10.0
    client_delta: Compression = 10.0


class State(NamedTuple):
    params: PyTree
    gradient: PyTree  # G of this round
    unsent: PyTree = ()  # E


class Message(NamedTuple):
    params: PyTree
    gradient: PyTree


def dropped(size: int, delta: Array) -> Array:
    """How many are not kept of `size`; none at delta = 1, even where the size is rounded."""
    rounded = float(size)
    return jnp.floor(rounded - rounded / delta.astype(float)).astype(int)


def largest(delta: Array, values: PyTree) -> PyTree:
    """C: the ceil(d / delta) of all d entries that are largest in magnitude, the others 0."""
    flat, restore = ravel_pytree(values)
    # Nan counts as the largest: if it could be dropped, a broken client would pass for a sound one.
    order = jnp.argsort(jnp.abs(flat))
    kept = jnp.arange(flat.size) >= dropped(flat.size, delta)
    mask = jnp.zeros(flat.size, bool).at[order].set(kept)
    return restore(jnp.where(mask, flat, jnp.zeros_like(flat)))


def compress(delta: Array, gradient: PyTree, unsent: PyTree) -> tuple[PyTree, PyTree]:
    """What is sent of the gradient and of what was not sent before, and what is not sent now."""
    total = tree.add(unsent, gradient)
    sent = largest(delta, total)
    return sent, tree.sub(total, sent)


def send_point(hp: Any, state: State) -> PyTree:
    return state.params


def send_gradient(hp: Any, state: State) -> Message:
    return Message(state.params, state.gradient)


def merge_moves(hp: Any, state: State, total: local.Weighted) -> State:
    return state._replace(params=tree.axpy(hp.server_lr, local.mean(total), state.params))


def make(
    rate: Rate = "step",
    same_batch: Choice = "no",
    server_topk: Switch = "off",
    client_topk: Switch = "off",
) -> Algorithm:
    """FedLin (Mitra et al. 2021): local steps corrected by the cohort's gradient."""

    def init(hp: Any, params: PyTree) -> State:
        zeros = tree.zeros_like(params)
        return State(params, zeros, zeros if server_topk == "on" else ())

    def memory(hp: Any, params: PyTree) -> PyTree:
        return tree.zeros_like(params) if client_topk == "on" else ()

    def give_gradient(
        hp: Any, task: Task, params: PyTree, unsent: PyTree, shard: Shard, key: Array
    ) -> tuple[local.Weighted, PyTree, Seen]:
        gradient = task.full_gradient(params, shard, key)
        if client_topk == "on":
            gradient, unsent = compress(hp.client_delta, gradient, unsent)
        return local.weighted(shard, gradient), unsent, nothing_seen()

    def merge_gradients(hp: Any, state: State, total: local.Weighted) -> State:
        gradient, unsent = local.mean(total), state.unsent
        if server_topk == "on":
            gradient, unsent = compress(hp.server_delta, gradient, unsent)
        return State(state.params, gradient, unsent)

    def take_steps(
        hp: Any, task: Task, message: Message, unsent: PyTree, shard: Shard, key: Array
    ) -> tuple[local.Weighted, PyTree, Seen]:
        batches = task.batches(shard, key)
        lr = hp.client_lr
        if rate == "total":
            steps = jnp.asarray(batches.steps, lr.dtype)
            lr = lr / jnp.maximum(steps, 1)  # an empty client takes none
        if same_batch == "no":
            own = task.full_gradient(message.params, shard, key)

        def step(y: PyTree, batch: Batch) -> tuple[PyTree, Seen]:
            gradient, seen = task.gradient(y, batch)
            share = task.batch_share(batch)
            correction = tree.scale(share, message.gradient)
            if same_batch == "no":
                correction = tree.axpy(-share, own, correction)
            else:
                correction = tree.sub(correction, task.gradient(message.params, batch)[0])
            return tree.axpy(-lr, tree.add(gradient, correction), y), seen

        y, seen = local.steps(step, message.params, batches)
        return local.weighted(shard, tree.sub(y, message.params)), unsent, seen

    return Algorithm(
        HYPERS[server_topk, client_topk],
        init,
        memory,
        (
            Phase(send_point, give_gradient, merge_gradients),
            Phase(send_gradient, take_steps, merge_moves),
        ),
    )


HYPERS: dict[tuple[Switch, Switch], Any] = {  # by server_topk and client_topk
    ("off", "off"): Hyper,
    ("on", "off"): ServerTopK,
    ("off", "on"): ClientTopK,
    ("on", "on"): BothTopK,
}

variants = {"fedlin": make}
unbiased = ("fedlin",)
reductions = [
    Reduction("fedlin", {"server_delta": 1.0}, "fedlin", options={"server_topk": "on"}),
    Reduction("fedlin", {"client_delta": 1.0}, "fedlin", options={"client_topk": "on"}),
]
