"""F1 and F2: equalities that the paper claims to be exact, on runs of the library in float64."""

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jax import Array, lax

from fedda import api
from fedda.models import Model
from fedda.simulate import train
from fedda_reproduction.theory import equations
from fedda_reproduction.theory.equations import Hyper, States
from fedda_reproduction.theory.problems import LearningTask, Problem, over_problems

ETA, ALPHA, BETA1, BETA2, EPS = 0.3, 0.4, 0.9, 0.99, 0.05
SETTINGS: Mapping[str, dict[str, float]] = {
    "sgdm": {"beta1": BETA1},
    "adam": {"beta1": BETA1, "beta2": BETA2, "eps": EPS},
    "adagrad": {"beta1": BETA1, "eps": EPS},
}


def server_states(
    algorithm: str, model: Model, clients: Any, loss: Any, *, seed: int = 0, **settings: Any
) -> Iterator[Any]:
    """Train as `fedda.run` does; yield the server's state at the start and after every round."""
    setup, hyper = api.prepare(algorithm, model, clients, loss, eval_every=1, **settings)
    for evaluation in train.train(setup, api.traced(hyper, model), [seed]):
        yield jax.tree.map(np.array, evaluation.run.state)


def _full_batch_states(method: str, task: LearningTask, **settings: Any) -> list[Any]:
    """Return the server's states of FedDA with full batches and all clients."""
    everyone = {"cohort": len(task.clients), "batch": len(task.clients[0][0])}
    rates: dict[str, Any] = {"client_lr": ETA, "server_lr": ALPHA} | SETTINGS[method]
    run = partial(server_states, f"fedda-{method}", task.model, task.clients, task.loss)
    return list(run(**everyone, **rates, **settings))


def optimiser(method: str) -> optax.GradientTransformation:
    """Return the centralised optimiser of Optax, with the learning rate alpha eta."""
    rate = ALPHA * ETA
    if method == "sgdm":
        return optax.sgd(rate * (1 - BETA1), BETA1)  # Optax does not damp: the rate makes up for it
    if method == "adam":
        return optax.adam(rate, BETA1, BETA2, EPS)
    # Optax adds eps inside the root. Without eps it gives g / sqrt(V), which this divides by
    # 1 + eps / sqrt(V).
    plain = optax.scale_by_rss(initial_accumulator_value=0.0, eps=0.0)

    def update(gradient: Any, state: Any, params: Any = None) -> Any:
        step, state = plain.update(gradient, state)
        return -rate * step / (1 + EPS / jnp.sqrt(state[0])), state

    return optax.GradientTransformation(plain.init, update)


def f1(method: str, task: LearningTask, rounds: int) -> dict[str, float]:
    """Compare FedDA with T = 1 with Optax on all data in one place.

    Returns:
        `apart`, the largest difference of any weight after any round, and `moved`, the largest
        distance of any weight from its start.
    """
    ours = [state.params for state in _full_batch_states(method, task, rounds=rounds, local_work=1)]
    x, y = (jnp.asarray(np.concatenate(part)) for part in zip(*task.clients, strict=True))
    chosen = optimiser(method)

    def step(carried: tuple[Array, Any], _: None) -> tuple[tuple[Array, Any], Array]:
        w, state = carried
        gradient = jax.grad(lambda w: task.loss(task.model.apply(w, x), y).mean())(w)
        updates, state = chosen.update(gradient, state, w)
        return (w + updates, state), w

    with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers and floats
        start = ours[0], chosen.init(ours[0])
        theirs = lax.scan(step, start, None, rounds + 1)[1]
    apart, moved = np.abs(np.stack(ours) - theirs).max(), np.abs(ours[-1] - ours[0]).max()
    return {"apart": float(apart), "moved": float(moved)}


def f2(task: LearningTask, local: int = 10, rounds: int = 3) -> float:
    """Compare FedDA's aggregated momentum with the momentum of the mean gradients.

    The latter is m <- beta1 m + (1 - beta1) sum p_i g_i(W_i), computed in one place that sees every
    client's gradient after every step. Each round starts from the library's state.

    Returns:
        The largest difference of any component after any round.
    """

    @jax.jit
    def central(w: Array, m: Array) -> Array:
        def body(_: Any, carried: tuple[Array, Array]) -> tuple[Array, Array]:
            points, m = carried
            g = jax.vmap(task.problem.gradient)(task.problem.data, points)
            return points - ETA * g, BETA1 * m + (1 - BETA1) * g.mean(0)

        points = jnp.repeat(w[None], len(task.clients), 0)
        return lax.fori_loop(0, local, body, (points, m))[1]

    states = _full_batch_states("sgdm", task, rounds=rounds, local_work=local)
    return max(
        float(np.abs(after.momentum - central(before.params, before.momentum)).max())
        for before, after in itertools.pairwise(states)
    )


@partial(over_problems, static=("method", "steps"))
def precise(problem: Problem, *, method: str, steps: int = 50) -> Array:
    """Return the largest distance of a method's precise decomposition from the whole.

    It is that of any entry of m or W after any step, for each of the problems.
    """
    whole = equations.centralised(method, problem, Hyper(0.1))
    parts = equations.decomposed(method, "precise", problem, Hyper(0.1))

    def apart(states: States) -> Array:
        return jnp.abs(equations.observed(whole, states[0]) - equations.observed(parts, states[1]))

    states = [equations.initial(equation, problem.start) for equation in (whole, parts)]
    return equations.follow((whole, parts), states, steps, apart).max()
