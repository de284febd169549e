"""STEM (Khanduri et al., NeurIPS 2021): local steps along STORM's momentum, averaged with it.

    client i:  x = X;  d = D;  t = t_r;  for every local step:
                   z = x;  x <- x - eta_t d
                   d <- g_i(x; batch) + (1 - a_t) (d - g_i(z; batch))    one batch for both
                   t <- t + 1
               upload  N_i (x - X),  N_i d,  N_i (t - t_r),  N_i
    server:    X <- X + (mean of x_i - X);  D <- (mean of d_i);  t_r <- t_r + (mean of t_i - t_r)
               W = X - eta_t D, the model, where t = t_r;  the means are weighted by N_i

Both gradients of a step are taken on one batch, with the same dropout and augmentation. Their
difference shows how the gradient changed from `z` to `x`, so `d` can keep what it has learnt. The
server's step, from the mean point along the mean direction, leads to `W`. It is also the first
step of every client in the next round, so the server sends `X` and `D` and not `W`. A client does
not move along its last `d`, so a round of `T` local steps moves `T` times. Where clients differ
in the number of their steps, `t_r` is a mean and need not be a whole number.

In the first round (`t_r = 0`), clients do not move. They upload the gradient of all their examples
at `X` as their `d`, which counts as one step. So `D` is the full-batch gradient of a cohort, as the
method requires. `X` starts at the initial `W`.

Option:
    schedule  constant: `eta_t = client_lr` and `a_t = a`. theory:
              `eta_t = kappa / (w + sigma2 t)^(1/3)` and `a_t = min(1, c eta_t²)`, which hardly
              forgets once `eta_t` is small.

All of this is from memory of the paper and unchecked: only its abstract and no public code was
found. In the paper all clients take part and have equal weight. Ranges from memory: `kappa` 0.01
to 0.5, `c` 1 to 10, `w = 1`. Several local steps drift from the optimum, as FedAvg's do; one does
not.

Weighting: by the number of examples. Clients keep nothing; the server keeps `X`, `D`, `t_r` and
`W`.
Communication, in models: 2 down, 2 up.
"""

from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from fedda.algorithms.registry import Reduction, Variant
from fedda.core import local, tree
from fedda.core.algorithm import Algorithm, Domain, NonNegative, Phase, Positive, Seen
from fedda.core.task import Batch, Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard

Share = Annotated[float, Domain("a number in (0, 1]", lambda value: 0 < value <= 1)]


class Constant(NamedTuple):
    client_lr: Positive = 0.1
    a: Share = 0.1


class Theory(NamedTuple):
    kappa: Positive = 0.1
    w: Positive = 1.0
    sigma2: NonNegative = 1.0
    c: Positive = 10.0  # a = 0.1 at t = 0, as in the other schedule


class Point(NamedTuple):
    x: PyTree  # where the last gradient was taken
    direction: PyTree
    time: Array  # the number of steps; at the server, the mean of these numbers


class State(NamedTuple):
    params: PyTree
    point: Point


class Upload(NamedTuple):
    moved: PyTree  # x - X
    direction: PyTree
    steps: local.Counter


Number = float | Array
Rates = Callable[[Any, Array], tuple[Number, Number]]  # (hp, t) -> eta_t, a_t


def constant(hp: Constant, time: Array) -> tuple[Number, Number]:
    return hp.client_lr, hp.a


def theory(hp: Theory, time: Array) -> tuple[Number, Number]:
    eta = hp.kappa / jnp.cbrt(hp.w + hp.sigma2 * time)
    return eta, jnp.minimum(1, hp.c * eta**2)


def init(hp: Any, params: PyTree) -> State:
    return State(params, Point(params, tree.zeros_like(params), jnp.zeros(())))


def send(hp: Any, state: State) -> Point:
    return state.point


def work(
    rates: Rates, hp: Any, task: Task, start: Point, memory: PyTree, shard: Shard, key: Array
) -> tuple[local.Weighted, PyTree, Seen]:
    def step(point: Point, batch: Batch) -> tuple[Point, Seen]:
        eta, a = rates(hp, point.time)
        x = tree.axpy(-eta, point.direction, point.x)
        new, seen = task.gradient(x, batch)
        old, _ = task.gradient(point.x, batch)
        direction = tree.axpy(1 - a, tree.sub(point.direction, old), new)
        return Point(x, direction, point.time + 1), seen

    def begin(_: Array, unmoved: tuple[Point, Seen]) -> tuple[Point, Seen]:
        gradient, seen = task.gradient(start.x, task.whole(shard, key))
        return Point(start.x, gradient, start.time + 1), seen

    first, batches = start.time == 0, task.batches(shard, key)
    batches = batches._replace(steps=jnp.where(first, 0, batches.steps))
    end = local.steps(step, start, batches, maybe_none=True)
    # A loop of 0 or 1 steps: `lax.cond` would compute both results if runs are trained together.
    (x, direction, time), seen = lax.fori_loop(0, first.astype("int32"), begin, end)
    upload = Upload(tree.sub(x, start.x), direction, local.Counter(time - start.time))
    return local.weighted(shard, upload), memory, seen


def merge(rates: Rates, hp: Any, state: State, total: local.Weighted) -> State:
    moved, direction, steps = local.mean(total)
    point = Point(tree.add(state.point.x, moved), direction, state.point.time + steps.value)
    eta, _ = rates(hp, point.time)
    return State(tree.axpy(-eta, direction, point.x), point)


SCHEDULES: dict[str, tuple[Any, Rates]] = {
    "constant": (Constant, constant),
    "theory": (Theory, theory),
}


def make(schedule: Literal["constant", "theory"] = "constant") -> Algorithm:
    """STEM (Khanduri et al. 2021): local STORM momentum, averaged with the models."""
    Hyper, rates = SCHEDULES[schedule]
    phase = Phase(send, partial(work, rates), partial(merge, rates))
    return Algorithm(Hyper=Hyper, init=init, phases=(phase,))


variants = {
    "stem": Variant(
        make, "STEM", "Khanduri et al. 2021", "local STORM momentum, averaged", down=2, up=2
    )
}
reductions = [
    Reduction(  # sigma2 = 0 makes the schedule constant: eta = kappa / w^(1/3), a = c eta²
        "stem",
        {"kappa": 0.2, "w": 8.0, "sigma2": 0.0, "c": 30.0},
        "stem",
        {"client_lr": 0.1, "a": 0.3},
        {"schedule": "theory"},
    )
]
