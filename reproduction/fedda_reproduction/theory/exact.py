"""F1 and F2: what the paper claims to be exact, on the library's own runs in float64."""

import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedda import api
from fedda.simulate import train
from fedda_reproduction.theory.flows import (
    Hyper,
    begin,
    centralised,
    divided,
    euler,
    extra,
    momentum,
)
from fedda_reproduction.theory.problems import FAMILIES, Gradient, Learnt, Problem

ETA, ALPHA, BETA1, BETA2, EPS = 0.3, 0.4, 0.9, 0.99, 0.05
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "sgdm": {"beta1": BETA1},
    "adam": {"beta1": BETA1, "beta2": BETA2, "eps": EPS},
    "adagrad": {"beta1": BETA1, "eps": EPS},
}


def _states(method: str, task: Learnt, **settings: Any) -> list[Any]:
    """The server's states of a run by the library, with full batches and everybody."""
    setup, hyper = api.prepare(
        f"fedda-{method}",
        task.model,
        task.clients,
        task.loss,
        cohort=len(task.clients),
        batch=len(task.clients[0][0]),  # as many as everybody has
        eval_every=1,
        client_lr=ETA,
        server_lr=ALPHA,
        **SETTINGS[method],
        **settings,
    )
    runs = train.train(setup, api.traced(hyper, task.model), [0])
    return [jax.tree.map(np.asarray, each.run.state) for each in runs]


def optimiser(method: str) -> Any:
    """The centralised optimiser by Optax, with the rate alpha eta."""
    optax = extra("optax")
    rate = ALPHA * ETA
    if method == "sgdm":
        return optax.sgd(rate * (1 - BETA1), BETA1)  # it does not damp: the rate makes up for it
    if method == "adam":
        return optax.adam(rate, BETA1, BETA2, EPS)
    # Optax adds eps inside the root. Without one it gives g / sqrt(V), which this divides by
    # 1 + eps / sqrt(V).
    plain = optax.scale_by_rss(initial_accumulator_value=0.0, eps=0.0)

    def update(gradient: Any, state: Any, params: Any = None) -> Any:
        step, state = plain.update(gradient, state)
        return -rate * step / (1 + EPS / jnp.sqrt(state[0])), state

    return optax.GradientTransformation(plain.init, update)


def f1(method: str, task: Learnt, rounds: int) -> dict[str, float]:
    """FedDA with T = 1 against Optax on all data in one place.

    The largest difference of any weight after any round, and how far a weight has moved at most.
    """
    ours = [state.params for state in _states(method, task, rounds=rounds, local_work=1)]
    x, y = (jnp.asarray(np.concatenate(part)) for part in zip(*task.clients, strict=True))
    chosen = optimiser(method)

    @jax.jit
    def step(w: Array, state: Any) -> tuple[Array, Any]:
        gradient = jax.grad(lambda w: task.loss(task.model.apply(w, x), y).mean())(w)
        updates, state = chosen.update(gradient, state, w)
        return w + updates, state

    with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
        w = task.problem.start
        state, theirs = chosen.init(w), [w]
        for _ in range(rounds):
            w, state = step(w, state)
            theirs.append(w)
    apart = max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
    return {"apart": apart, "moved": float(np.abs(ours[-1] - ours[0]).max())}


def f2(task: Learnt, local: int = 10, rounds: int = 3) -> float:
    """The library's aggregated momentum against the momentum of the clients' mean gradients.

    The latter is of one place that sees every client's gradient after every step. The largest
    difference of any component after any round; each starts from the library's own state.
    """

    @jax.jit
    def central(w: Array, m: Array) -> Array:
        def body(_: Any, carried: tuple[Array, Array]) -> tuple[Array, Array]:
            points, m = carried
            g = jax.vmap(task.gradient)(task.problem.data, points)
            return points - ETA * g, BETA1 * m + (1 - BETA1) * g.mean(0)

        points = jnp.repeat(w[None], len(task.clients), 0)
        return lax.fori_loop(0, local, body, (points, m))[1]

    states = _states("sgdm", task, rounds=rounds, local_work=local)
    return max(
        float(np.abs(after.momentum - central(before.params, before.momentum)).max())
        for before, after in itertools.pairwise(states)
    )


@partial(jax.jit, static_argnames=("gradient", "method", "steps"))
def _apart(gradient: Gradient, method: str, steps: int, problems: Problem) -> Array:
    def one(problem: Problem) -> Array:
        hyper = Hyper(0.1)
        central = centralised(method, gradient, problem, hyper)
        precise = divided(method, "precise", gradient, problem, hyper)

        def body(states: Any, t: Array) -> Any:
            whole, parts = states
            whole = euler(central, t * hyper.eta, whole)
            parts = euler(precise, t * hyper.eta, parts)
            of_momentum = momentum(central, whole) - momentum(precise, parts)
            return (whole, parts), jnp.abs(jnp.stack([whole.model - parts.model, of_momentum]))

        states = begin(central, problem.start), begin(precise, problem.start)
        return lax.scan(body, states, jnp.arange(float(steps)))[1].max()

    return jax.vmap(one)(problems).max()


def precise(
    name: str, problems: Problem, methods: Sequence[str], steps: int = 50
) -> dict[str, float]:
    """How far each optimiser's precise decomposition ever is from the centralised optimiser."""
    gradient = FAMILIES[name].gradient
    return {method: float(_apart(gradient, method, steps, problems)) for method in methods}
