"""FedLin (Mitra et al., NeurIPS 2021): local steps along the cohort's gradient, not the client's.

A round has two exchanges, A and B, with the same clients. `f_i` is the mean loss of all examples
of client i.

    A client i:  h = grad f_i(W)
                 upload  N_i h,  N_i
    A server:    G = sum_i N_i h_i / sum_i N_i
    B client i:  y = W;  y <- y - e * (g_i(y; batch) - grad f_i(W) + G)    for every local step
                 upload  N_i (y - W),  N_i
    B server:    W <- W + server_lr * sum_i N_i (y_i - W) / sum_i N_i

With ``reduction="sum"``, `g_i(y; batch)` is `b` times a mean for a batch of `b` examples. Then
`h`, `grad f_i(W)` and `G` are those of a whole mini-batch, `B` times a mean, and a step takes
`b / B` of them.

At `y = W` the step follows `G`. So if each client takes one full-batch step, a round is one step
of gradient descent on the cohort's loss. Client i computes `grad f_i(W)` in A and again in B, so
it need not keep it; a model with dropout draws new noise. In the paper all clients take part, the
mean is plain and ``server_lr`` is 1 (WilliamYi96/VR-ProxSkip, main_0002.py, and
zuangwang/fedrecu, trainers.py, read it so). From memory of the paper, unchecked: batches are
full, and `e K_i` is the same for all clients, where `K_i` is the number of local steps. Sampled
cohorts, mini-batches and the weights `N_i` are our additions, for federations with many clients.

Options:
    rate         step: `e = client_lr`. total: `e = client_lr / K_i`.
    same_batch   no: as above. yes: `g_i(W; batch)` in place of `grad f_i(W)`, on the same batch
                 and with the same noise as `g_i(y; batch)`, as in SVRG. This has less variance
                 and costs two gradients a step.

The paper also sparsifies the gradients of A, with error feedback. That is not implemented here;
``fedda.transforms.compression.top_k`` sparsifies the uploads of any algorithm.

Weighting: by the number of examples. Clients keep nothing; the server keeps `W` (and `G` within a
round).
Communication, in models: 3 down, 2 up. The server sends `W` in A and again in B; a client that
kept it between the two would save one.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedda.algorithms import fedavg
from fedda.algorithms.registry import Variant
from fedda.core import local, tree
from fedda.core.algorithm import Algorithm, Phase, Positive, Seen, nothing_seen
from fedda.core.task import Batch, Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard


class Hyper(NamedTuple):
    client_lr: Positive = 0.1
    server_lr: Positive = 1.0


class State(NamedTuple):
    params: PyTree
    gradient: PyTree  # G of this round


def init(hp: Hyper, params: PyTree) -> State:
    return State(params, tree.zeros_like(params))


def measure(
    hp: Hyper, task: Task, params: PyTree, memory: PyTree, shard: Shard, key: Array
) -> tuple[local.Weighted, PyTree, Seen]:
    gradient = task.full_gradient(params, shard, key)
    return local.weighted(shard, gradient), memory, nothing_seen()


def merge_gradients(hp: Hyper, state: State, total: local.Weighted) -> State:
    return State(state.params, local.mean(total))


def send_state(hp: Hyper, state: State) -> State:
    return state


def merge_moves(hp: Hyper, state: State, total: local.Weighted) -> State:
    return state._replace(params=tree.axpy(hp.server_lr, local.mean(total), state.params))


def make(
    rate: Literal["step", "total"] = "step", same_batch: Literal["no", "yes"] = "no"
) -> Algorithm:
    """FedLin (Mitra et al. 2021): local steps corrected by the cohort's gradient."""

    def take_steps(
        hp: Hyper, task: Task, server: State, memory: PyTree, shard: Shard, key: Array
    ) -> tuple[local.Weighted, PyTree, Seen]:
        batches, lr = task.batches(shard, key), jnp.asarray(hp.client_lr)
        if rate == "total":
            steps = jnp.asarray(batches.steps, lr.dtype)
            lr = lr / jnp.maximum(steps, 1)  # a client without examples takes no steps
        if same_batch == "no":
            full = task.full_gradient(server.params, shard, key)

        def step(y: PyTree, batch: Batch) -> tuple[PyTree, Seen]:
            gradient, seen = task.gradient(y, batch)
            share = task.batch_share(batch)
            correction = tree.scale(share, server.gradient)
            if same_batch == "no":
                correction = tree.axpy(-share, full, correction)
            else:
                correction = tree.sub(correction, task.gradient(server.params, batch)[0])
            return tree.axpy(-lr, tree.add(gradient, correction), y), seen

        y, seen = local.steps(step, server.params, batches)
        return local.weighted(shard, tree.sub(y, server.params)), memory, seen

    phases = (
        Phase(fedavg.send, measure, merge_gradients),
        Phase(send_state, take_steps, merge_moves),
    )
    return Algorithm(Hyper=Hyper, init=init, phases=phases)


variants = {
    "fedlin": Variant(
        make, "FedLin", "Mitra et al. 2021", "corrected local steps", down=3, up=2, unbiased=True
    )
}
