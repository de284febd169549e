"""FedLocal (Wang et al., 2021): clients run an adaptive optimiser, restarted in every round.

    client i:  y = W;  u = v = q = A = 0;  for local step k = 1 .. K_i, with g = g_i(y; batch):
      sgdm         u <- beta u + g;  y <- y - client_lr * u;  p = 1
      adam         u <- beta1 u + (1 - beta1) g;  v <- beta2 v + (1 - beta2) g²
                   y <- y - client_lr * (u / (1 - beta1^k)) / (sqrt(v / (1 - beta2^k)) + eps)
                   p = 1 / (sqrt(v) + eps)          this v is not corrected for bias
      adagrad      v <- v + g²;  y <- y - client_lr * g / (sqrt(v) + eps);  p = 1 / (sqrt(v) + eps)
    client i:      q <- beta q + (1 - beta) p       with beta = beta1 for adam, and 0 for adagrad
                   A <- A + q
               upload  N_i (y - W) / A,  N_i / A,  N_i
    server:    D_i = (y_i - W) / A_i,  and 0 where A_i = 0;  means are weighted by N_i
               W <- W + server_lr * (mean of D_i) / (mean of 1 / A_i)

`A_i` is the total factor that the client's optimiser applied to its gradients. After division by
it, clients that took more or longer steps do not pull the mean towards their own optimum. SGDM
has an undamped momentum and a damped `q`, which makes a factor `1 - beta` in `A_i`. The factor
cancels in the joint correction and stays in the local one. For plain SGD, `A_i` is the number of
local steps, and this is FedNova. If all `A_i` are equal, the correction changes nothing.

Option:
    correction  joint: as above. local: `W <- W + server_lr * (mean of D_i)`. none:
                `W <- W + server_lr * (mean of y_i - W)`, and `1 / A_i` is not sent.

Weighting: by the number of examples. Clients keep nothing; the server keeps `W`. For SGDM, `A_i`
is one number, which costs nothing to send.
Communication, in models: 1 down, 1 up (fedlocal-sgdm); 1 down, 2 up (fedlocal-adam,
fedlocal-adagrad).
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from fedda.algorithms import fedavg
from fedda.algorithms.registry import Reduction, Variant
from fedda.core import local, tree
from fedda.core.algorithm import Algorithm, Decay, Phase, Positive, Seen
from fedda.core.task import Batch, Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard


class SGDM(NamedTuple):
    client_lr: Positive = 0.1
    server_lr: Positive = 1.0
    beta: Decay = 0.9


class Adam(NamedTuple):
    client_lr: Positive = 0.01
    server_lr: Positive = 1.0
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    eps: Positive = 1e-3


class AdaGrad(NamedTuple):
    client_lr: Positive = 0.01
    server_lr: Positive = 1.0
    eps: Positive = 1e-3


class Moments(NamedTuple):
    """The state of a client's optimiser in one round."""

    first: PyTree = ()  # u
    second: PyTree = ()  # v
    steps: PyTree = ()  # k, as a floating-point number, because it is an exponent


class Optimiser(NamedTuple):
    """The optimiser of a client."""

    Hyper: type[Any]
    beta: Callable[[Any], ArrayLike]
    start: Callable[[PyTree], tuple[Moments, PyTree]]  # the moments, and zeros of the shape of p
    step: Callable[[Any, Moments, PyTree], tuple[PyTree, Moments, PyTree]]
    # (hp, moments, g) -> (direction, moments, p)
    counts: bool = False  # whether p, and so A_i, depend only on the number of steps


class Upload(NamedTuple):
    moved: PyTree  # y - W, or D_i
    inverse: PyTree = ()  # 1 / A_i; a Counter if it depends only on the number of steps


Correction = Literal["joint", "local", "none"]


def divide(x: PyTree, y: PyTree) -> PyTree:
    """Return `x / y`, or 0 where `y` is 0. Non-finite entries of `x` stay non-finite."""
    return jax.tree.map(lambda x, y: jnp.where(y == 0, 0 * x, x / y), x, y)


def damped_root(hp: Any, v: PyTree) -> PyTree:
    """Return `sqrt(v) + eps`."""
    return jax.tree.map(lambda leaf: jnp.sqrt(leaf) + jnp.asarray(hp.eps, leaf.dtype), v)


def federated(optimiser: Optimiser, correction: Correction) -> Algorithm:
    def work(
        hp: Any, task: Task, params: PyTree, memory: PyTree, shard: Shard, key: Array
    ) -> tuple[local.Weighted, PyTree, Seen]:
        def step(carry: tuple[PyTree, ...], batch: Batch) -> tuple[tuple[PyTree, ...], Seen]:
            y, moments, q, A = carry
            gradient, seen = task.gradient(y, batch)
            direction, moments, p = optimiser.step(hp, moments, gradient)
            q = tree.blend(optimiser.beta(hp), q, p)
            return (tree.axpy(-hp.client_lr, direction, y), moments, q, tree.add(A, q)), seen

        moments, zero = optimiser.start(params)
        start = (params, moments, zero, zero)
        (y, _, _, A), seen = local.steps(step, start, task.batches(shard, key))
        moved = tree.sub(y, params)
        if correction == "none":
            upload = Upload(moved)
        elif correction == "local":
            upload = Upload(divide(moved, A))
        else:
            inverse = divide(jax.tree.map(jnp.ones_like, A), A)
            inverse = local.Counter(inverse) if optimiser.counts else inverse
            upload = Upload(divide(moved, A), inverse)
        return local.weighted(shard, upload), memory, seen

    def merge(hp: Any, state: fedavg.State, total: local.Weighted) -> fedavg.State:
        moved, inverse = local.mean(total)
        if correction == "joint":
            moved = divide(moved, inverse.value if optimiser.counts else inverse)
        return fedavg.State(tree.axpy(hp.server_lr, moved, state.params))

    phases = (Phase(fedavg.send, work, merge),)
    return Algorithm(Hyper=optimiser.Hyper, init=fedavg.init, phases=phases)


def sgdm(correction: Correction = "joint") -> Algorithm:
    """FedLocal+SGDM (Wang et al. 2021): clients run SGDM, corrected for their steps."""

    def start(params: PyTree) -> tuple[Moments, PyTree]:
        # One number for each array, because p, q and A are the same for all its entries.
        zero = jax.tree.map(lambda leaf: jnp.zeros((), leaf.dtype), params)
        return Moments(first=tree.zeros_like(params)), zero

    def step(hp: SGDM, moments: Moments, g: PyTree) -> tuple[PyTree, Moments, PyTree]:
        u = tree.axpy(hp.beta, moments.first, g)
        one = jax.tree.map(lambda leaf: jnp.ones((), leaf.dtype), g)
        return u, Moments(first=u), one

    optimiser = Optimiser(SGDM, lambda hp: hp.beta, start, step, counts=True)
    return federated(optimiser, correction)


def adam(correction: Correction = "joint") -> Algorithm:
    """FedLocal+Adam (Wang et al. 2021): clients run Adam, corrected for their steps."""

    def start(params: PyTree) -> tuple[Moments, PyTree]:
        zeros = tree.zeros_like(params)
        return Moments(zeros, zeros, jnp.zeros(())), zeros

    def step(hp: Adam, moments: Moments, g: PyTree) -> tuple[PyTree, Moments, PyTree]:
        k = moments.steps + 1
        u = tree.blend(hp.beta1, moments.first, g)
        v = tree.blend(hp.beta2, moments.second, tree.square(g))
        first, second = tree.scale(1 / (1 - hp.beta1**k), u), tree.scale(1 / (1 - hp.beta2**k), v)
        direction = tree.over_root(first, second, hp.eps)
        return direction, Moments(u, v, k), jax.tree.map(jnp.reciprocal, damped_root(hp, v))

    return federated(Optimiser(Adam, lambda hp: hp.beta1, start, step), correction)


def adagrad(correction: Correction = "joint") -> Algorithm:
    """FedLocal+AdaGrad (Wang et al. 2021): clients run AdaGrad, corrected for their steps."""

    def start(params: PyTree) -> tuple[Moments, PyTree]:
        zeros = tree.zeros_like(params)
        return Moments(second=zeros), zeros

    def step(hp: AdaGrad, moments: Moments, g: PyTree) -> tuple[PyTree, Moments, PyTree]:
        v = tree.add(moments.second, tree.square(g))
        root = damped_root(hp, v)
        p = jax.tree.map(jnp.reciprocal, root)
        return jax.tree.map(jnp.divide, g, root), Moments(second=v), p

    return federated(Optimiser(AdaGrad, lambda hp: 0.0, start, step), correction)


PAPER = "Wang et al. 2021"
variants = {
    "fedlocal-sgdm": Variant(sgdm, "FedLocal+SGDM", PAPER, "clients run SGDM", down=1, up=1),
    "fedlocal-adam": Variant(adam, "FedLocal+Adam", PAPER, "clients run Adam", down=1, up=2),
    "fedlocal-adagrad": Variant(
        adagrad, "FedLocal+AdaGrad", PAPER, "clients run AdaGrad", down=1, up=2
    ),
}
# With the joint correction, beta = 0 is FedAvg only if all clients take the same number of steps.
reductions = [Reduction("fedlocal-sgdm", {"beta": 0.0}, "fedavg", options={"correction": "none"})]
