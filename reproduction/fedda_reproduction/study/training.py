"""Train the runs of a wave, or of all seeds, in one program, and end them in four ways."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedda import api
from fedda.simulate.train import Setup, train
from fedda_reproduction.study.design import LANES, Condition, Method, Point
from fedda_reproduction.study.federations import STRIDE, Examples, Federation

ENDINGS = ("plain", "averaged", "full batches", "step decay")
DECAY = 0.1  # of the server's rate in the last tenth, with the ending "step decay"
ITERATES = 4  # evaluations in the last tenth, whose models "averaged" averages
PART = 512  # examples that are evaluated at a time

Scores = dict[str, list[float | None]]


def prepared(condition: Condition, method: Method, federation: Federation) -> Setup:
    """Return what all runs of a method share. Raises `InputError` if something does not fit."""
    point = {"client_lr": 0.1, "step": 1.0, "horizon": 2.0, "eps": 0.01}
    setup, _ = api.prepare(
        method.algorithm, federation.model, federation.shards, federation.loss,
        rounds=condition.rounds, cohort=condition.cohort, batch=condition.batch,
        local_work=condition.local_steps, eval_every=condition.rounds // (10 * ITERATES),
        **method.options, **method.hyper(point, condition.local_steps),
    )  # fmt: skip
    return setup._replace(sample=federation.sample)


def _hyper(setup: Setup, condition: Condition, method: Method, points: Sequence[Point]) -> Any:
    Hyper = setup.algorithm.Hyper
    rows = [Hyper(**method.hyper(point, condition.local_steps)) for point in points]
    values = jax.tree.map(lambda *numbers: np.array(numbers), *rows)
    return api.traced(values, setup.task.model)


def _host(run: Any) -> Any:
    """Copy a run, whose memory the next program would reuse."""
    return jax.tree.map(np.array, jax.device_get(run))


def tuned(
    condition: Condition, method: Method, federation: Federation, points: Sequence[Point]
) -> Scores:
    """Train at every point on the first block, and measure on the held-out examples.

    Returns:
        For each point, the mean metric and loss over the evaluations in the last tenth; None where
        they are not finite.
    """
    setup = prepared(condition, method, federation)
    hp = _hyper(setup, condition, method, points)
    last_tenth = condition.rounds - condition.rounds // 10
    found = []
    for evaluation in train(setup, hp, [0] * len(points)):
        if evaluation.round > last_tenth:
            params = jax.device_get(evaluation.run.state.params)
            found.append(_measured(federation, params, [federation.held_out] * len(points)))
    return {name: _finite(np.mean([part[name] for part in found], 0)) for name in found[0]}


def ended(
    condition: Condition, method: Method, federation: Federation, point: Point, seeds: int
) -> dict[str, Scores]:
    """Train once for each seed, and measure every ending on the seed's test set.

    The endings are of the same run until the last tenth of the rounds.
    """
    setup = prepared(condition, method, federation)
    late = condition.rounds // 10
    blocks = [1 + lane % seeds for lane in range(LANES)]  # the other lanes are copies
    lanes = [block * STRIDE for block in blocks]
    hp = _hyper(setup, condition, method, [point] * LANES)
    tests = [federation.tests[block] for block in blocks[:seeds]]
    first = condition.rounds - late
    for evaluation in train(setup._replace(rounds=first), hp, lanes):
        begun = evaluation.run
    begun = _host(begun)

    def after(setup: Setup, hp: Any) -> list[Any]:
        run = jax.tree.map(jnp.array, begun)
        return [
            jax.device_get(each.run.state.params) for each in train(setup, hp, lanes, first, run)
        ]

    plain = after(setup, hp)
    slower = hp._replace(server_lr=DECAY * hp.server_lr)
    models = {
        "plain": plain[-1],
        "averaged": jax.tree.map(lambda *leaves: np.mean(leaves, 0), *plain),
        "full batches": after(setup._replace(stabilise=late), hp)[-1],
        "step decay": after(setup, slower)[-1],
    }
    return {
        ending: {
            name: _finite(values) for name, values in _measured(federation, params, tests).items()
        }
        for ending, params in models.items()
    }


def _finite(values: np.ndarray) -> list[float | None]:
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values]


def _measured(
    federation: Federation, params: Any, sets: Sequence[Examples]
) -> Mapping[str, np.ndarray]:
    """Return the metric and the loss of each model on its examples."""
    measure = _measure(federation.model.apply, federation.loss, federation.metric)
    rows = []
    for lane, (x, y) in enumerate(sets):
        size = min(PART, len(y))
        padded = -len(y) % size
        x, y = (np.concatenate([part, part[:padded]]) for part in (x, y))
        one = jax.tree.map(lambda leaf, lane=lane: leaf[lane], params)
        rows.append([float(value) for value in measure(one, x, y, len(y) - padded, size)])
    metric, loss = np.array(rows).T
    return {"metric": metric, "loss": loss}


@lru_cache(maxsize=8)
def _measure(apply: Callable[..., Any], loss: Any, metric: Any) -> Callable[..., Any]:
    @jax.jit
    def part(params: Any, x: Any, y: Any, counts: Any) -> Any:
        outputs = apply(params, x)
        value = metric(outputs, y)
        above, below = value if isinstance(value, tuple) else (value, jnp.ones(counts.shape))
        each = (above, below, loss(outputs, y), jnp.ones(counts.shape))
        return tuple(jnp.sum(jnp.where(counts, values, 0)) for values in each)

    def whole(params: Any, x: Any, y: Any, examples: int, size: int) -> tuple[float, float]:
        sums = np.zeros(4)
        for first in range(0, len(y), size):
            counts = np.arange(first, first + size) < examples
            found = part(params, x[first : first + size], y[first : first + size], counts)
            sums += np.array(jax.device_get(found), float)
        return sums[0] / sums[1], sums[2] / sums[3]

    return whole
