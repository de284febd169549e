"""Problems shared by clients: random quadratics and linear classifiers, networks on the digits.

In the four random families every client's gradient has the Lipschitz constant L_g = 1 (exactly for
quadratics, as the usual bound for classifiers), so that a step size is in units of 1 / L_g.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from jax.flatten_util import ravel_pytree

from fedda.core import losses
from fedda.data import digits, partition
from fedda.models import Model, cnn
from fedda_reproduction.theory.fits import Floats

DIMENSION = 10
EXAMPLES = 20  # per client of a classifier

Gradient = Callable[[Any, Array], Array]  # (a client's data, a point) -> the gradient there


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Problem:
    """One problem, or many of a family along a leading axis."""

    data: Any  # leading axis: clients
    weights: Any  # p_i: [clients], their sum is 1
    start: Any  # W(0): [d]
    gradient: Gradient = field(metadata={"static": True})


def over_problems(function: Callable[..., Any], static: Sequence[str] = ()) -> Callable[..., Any]:
    """Compile a function of a problem and keywords, and apply it along problems' leading axis."""

    @wraps(function)
    def batched(problems: Problem, **keywords: Any) -> Any:
        return jax.vmap(lambda problem: function(problem, **keywords))(problems)

    return jax.jit(batched, static_argnames=static)


class Family(NamedTuple):
    """Random problems of one kind."""

    draw: Callable[[np.random.Generator, int], Problem]  # (generator, number of clients)
    # Bound on the derivative of an example's loss by x w. It bounds the gradients, as the paper's
    # theorem assumes. None if gradients are unbounded.
    slope: float | None = None


def _weights(rng: np.random.Generator, clients: int) -> Floats:
    """Draw p_i, as if every client had between 1 and 10 examples."""
    sizes = rng.integers(1, 11, clients).astype(float)
    return sizes / sizes.sum()


def _quadratic(indefinite: bool, rng: np.random.Generator, clients: int) -> Problem:
    """Draw L_i(w) = (w - c_i)' A_i (w - c_i) / 2, where A_i has a random basis of eigenvectors.

    Its eigenvalues are in [-1, 1], and a client's smallest is -1. If not `indefinite`, they are in
    [0.01, 1], evenly in their logarithms, and a client's largest is 1.
    """
    basis, _ = np.linalg.qr(rng.normal(size=(clients, DIMENSION, DIMENSION)))
    uniform = rng.uniform(size=(clients, DIMENSION))
    uniform[:, 0] = 0 if indefinite else 1
    values = 2 * uniform - 1 if indefinite else 10 ** (2 * uniform - 2)
    matrices = np.einsum("cij,cj,ckj->cik", basis, values, basis)
    centres = rng.normal(size=(clients, DIMENSION))
    start = 3 * rng.normal(size=DIMENSION)
    weights = _weights(rng, clients)
    data = (matrices, centres)
    return Problem(data=data, weights=weights, start=start, gradient=_quadratic_gradient)


def _quadratic_gradient(data: tuple[Array, Array], w: Array) -> Array:
    matrix, centre = data
    return matrix @ (w - centre)


def _labelled(gradient: Gradient, bend: float, rng: np.random.Generator, clients: int) -> Problem:
    """Draw inputs times labels in {-1, 1}; every client has a mean and a labelling rule of its own.

    The inputs are scaled so that `bend` |X'X| / n, a bound of the client's Hessian, is 1.
    """
    x = rng.normal(size=(clients, EXAMPLES, DIMENSION)) + rng.normal(size=(clients, 1, DIMENSION))
    rules = rng.normal(size=(1, DIMENSION)) + rng.normal(size=(clients, DIMENSION))
    x *= np.sign(np.einsum("cnd,cd->cn", x, rules) + rng.logistic(size=x.shape[:2]))[..., None]
    largest = np.linalg.eigvalsh(np.einsum("cni,cnj->cij", x, x) / EXAMPLES)[:, -1]
    x /= np.sqrt(bend * largest)[:, None, None]
    weights, start = _weights(rng, clients), rng.normal(size=DIMENSION)
    return Problem(data=x, weights=weights, start=start, gradient=gradient)


def _logistic_gradient(x: Array, w: Array) -> Array:
    """Gradient of the mean of log(1 + exp(-x w)); its length is at most the mean |x|."""
    return -jax.nn.sigmoid(-x @ w) @ x / x.shape[0]


def _sigmoid_gradient(x: Array, w: Array) -> Array:
    """Gradient of the mean of 1 / (1 + exp(x w)), which is not convex; at most the mean |x| / 4."""
    chance = jax.nn.sigmoid(-x @ w)
    return -(chance * (1 - chance)) @ x / x.shape[0]


FAMILIES: Mapping[str, Family] = {
    "convex quadratic": Family(partial(_quadratic, False)),
    "indefinite quadratic": Family(partial(_quadratic, True)),
    "logistic": Family(partial(_labelled, _logistic_gradient, 1 / 4), slope=1.0),
    # The largest second derivative of the sigmoid is 1 / (6 sqrt(3)).
    "sigmoid": Family(partial(_labelled, _sigmoid_gradient, 3**-0.5 / 6), slope=1 / 4),
}


def draw(name: str, problems: int, clients: int, seed: int = 0) -> Problem:
    """Draw random problems of a family, stacked along a leading axis."""
    rng = np.random.default_rng([seed, clients, *name.encode()])
    drawn = [FAMILIES[name].draw(rng, clients) for _ in range(problems)]
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *drawn)


def gradient_bounds(slope: float, problems: Problem) -> Floats:
    """Return for each problem of a classifier a length G that no client's gradient exceeds."""
    return slope * np.linalg.norm(problems.data, axis=-1).mean(-1).max(-1)


def curvature(problem: Problem, iterations: int = 30) -> Array:
    """Return the largest |eigenvalue| of any client's Hessian at the start, by power iteration."""

    def of_client(data: Any) -> Array:
        def product(vector: Array) -> Array:
            return jax.jvp(partial(problem.gradient, data), (problem.start,), (vector,))[1]

        def body(_: Any, vector: Array) -> Array:
            image = product(vector)
            return image / jnp.linalg.norm(image)

        first = random.normal(random.key(0), problem.start.shape)
        last = jax.lax.fori_loop(0, iterations, body, first / jnp.linalg.norm(first))
        return jnp.linalg.norm(product(last))

    return jax.lax.map(of_client, problem.data).max()


class LearningTask(NamedTuple):
    """A model and its data, in the form of the library and in that of this package.

    The model's parameters are one vector. All clients have the same weight.
    """

    model: Model
    clients: list[tuple[Any, Any]]
    loss: Callable[[Any, Any], Any]
    problem: Problem


def _softplus(outputs: Array, y: Array) -> Array:
    """Logistic loss of inputs that were multiplied by their label."""
    return jax.nn.softplus(-outputs)


def logistic_task(clients: int, seed: int) -> LearningTask:
    """Draw one logistic problem."""
    drawn = jax.tree.map(lambda leaf: leaf[0], draw("logistic", 1, clients, seed))
    problem = replace(drawn, weights=jnp.full_like(drawn.weights, 1 / clients))
    model = Model(lambda key: problem.start, lambda w, x: x @ w)
    held = [(np.asarray(x), np.zeros(EXAMPLES)) for x in problem.data]
    return LearningTask(model=model, clients=held, loss=_softplus, problem=problem)


def flattened(layers: Model, seed: int) -> Model:
    """Return a model whose parameters are one float64 vector, initialised with `seed`."""
    params = layers.init(random.key(seed))
    start, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf.astype("float64"), params))
    return Model(lambda key: start, lambda w, x: layers.apply(unravel(w), x))


def digit_clients(clients: int, examples: int, seed: int) -> list[tuple[Any, Any]]:
    """Give every client the same number of digits, of few classes: Dirichlet(0.3)."""
    whole = digits.load()
    rng = np.random.default_rng(seed)
    chosen = [
        rng.choice(rows, examples, replace=len(rows) < examples)
        for rows in partition.dirichlet(whole.train_y, clients, 0.3, seed)
    ]
    return [(whole.train_x[rows] / 16.0, whole.train_y[rows]) for rows in chosen]


def network_tasks(number: int, seed: int) -> list[LearningTask]:
    """Return the small convolutional network in float64, without dropout, on the digits.

    Four clients have 20 digits each. The tasks differ in partition and initial parameters.
    """
    layers = cnn(8, 1, digits.NUM_CLASSES)
    models = [flattened(layers, seed + index) for index in range(number)]

    def gradient(data: tuple[Array, Array], w: Array) -> Array:
        x, y = data
        return jax.grad(lambda w: losses.cross_entropy(models[0].apply(w, x), y).mean())(w)

    tasks = []
    for index, model in enumerate(models):
        held = digit_clients(4, 20, seed + index)
        data = tuple(jnp.asarray(np.stack(part)) for part in zip(*held, strict=True))
        start = model.init(random.key(0))
        problem = Problem(data=data, weights=jnp.full(4, 1 / 4), start=start, gradient=gradient)
        tasks.append(LearningTask(model, held, losses.cross_entropy, problem))
    return tasks
