"""Random problems that are shared by clients: quadratics, two linear classifiers, a network.

Every client's gradient of the first four has the Lipschitz constant 1 (exactly for quadratics, as
the usual bound for the classifiers), so that a step size is in units of 1 / L_g.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array, random
from jax.flatten_util import ravel_pytree

from fedda.core import losses
from fedda.data import digits, partition
from fedda.models import Model, cnn
from fedda_reproduction.theory.fits import Floats

DIMENSION = 10
EXAMPLES = 20  # of a client of the classifiers

Gradient = Callable[[Any, Array], Array]  # (a client's data, a point) -> the gradient there


class Problem(NamedTuple):
    """One problem, or many of a family along a leading axis."""

    data: Any  # leading axis: clients
    weights: Any  # [clients], their sum is 1
    start: Any  # [d]


class Family(NamedTuple):
    """Problems of one kind."""

    draw: Callable[[np.random.Generator, int], Problem]  # (generator, clients)
    gradient: Gradient
    # The most that the loss of an example x changes with x w. So gradients are bounded, as the
    # paper's theorem assumes; None where they are not.
    slope: float | None = None


def _weights(rng: np.random.Generator, clients: int) -> Floats:
    """As if client i had between 1 and 10 examples."""
    sizes = rng.integers(1, 11, clients).astype(float)
    return sizes / sizes.sum()


def _quadratic(
    eigenvalues: Callable[[Floats], Floats], rng: np.random.Generator, clients: int
) -> Problem:
    """L_i(w) = (w - c_i)' A_i (w - c_i) / 2, where A_i has a random basis of eigenvectors."""
    basis, _ = np.linalg.qr(rng.normal(size=(clients, DIMENSION, DIMENSION)))
    values = eigenvalues(rng.uniform(size=(clients, DIMENSION)))
    matrices = np.einsum("cij,cj,ckj->cik", basis, values, basis)
    centres = rng.normal(size=(clients, DIMENSION))
    start = 3 * rng.normal(size=DIMENSION)
    return Problem((matrices, centres), _weights(rng, clients), start)


def _positive(uniform: Floats) -> Floats:
    """Between 0.01 and 1, evenly in their logarithms; a client's largest is 1."""
    uniform[:, 0] = 1
    return 10 ** (2 * uniform - 2)


def _of_both_signs(uniform: Floats) -> Floats:
    """Between -1 and 1; a client's smallest is -1."""
    uniform[:, 0] = 0
    return 2 * uniform - 1


def _quadratic_gradient(data: tuple[Array, Array], w: Array) -> Array:
    matrix, centre = data
    return matrix @ (w - centre)


def _labelled(bend: float, rng: np.random.Generator, clients: int) -> Problem:
    """Inputs around a mean of each client's own, times labels of a rule of its own, some wrong.

    They are scaled so that the bound `bend` |X'X| / n of a client's Hessian is 1.
    """
    x = rng.normal(size=(clients, EXAMPLES, DIMENSION)) + rng.normal(size=(clients, 1, DIMENSION))
    rules = rng.normal(size=(1, DIMENSION)) + rng.normal(size=(clients, DIMENSION))
    x *= np.sign(np.einsum("cnd,cd->cn", x, rules) + rng.logistic(size=x.shape[:2]))[..., None]
    largest = np.linalg.eigvalsh(np.einsum("cni,cnj->cij", x, x) / EXAMPLES)[:, -1]
    x /= np.sqrt(bend * largest)[:, None, None]
    return Problem(x, _weights(rng, clients), rng.normal(size=DIMENSION))


def _logistic_gradient(x: Array, w: Array) -> Array:
    """Of the mean of log(1 + exp(-x w)), where x has the sign of its label: at most |x|."""
    return -jax.nn.sigmoid(-x @ w) @ x / x.shape[0]


def _sigmoid_gradient(x: Array, w: Array) -> Array:
    """Of the mean of 1 / (1 + exp(x w)): at most |x| / 4, and no convex function."""
    chance = jax.nn.sigmoid(-x @ w)
    return -(chance * (1 - chance)) @ x / x.shape[0]


FAMILIES: Mapping[str, Family] = {
    "convex quadratic": Family(partial(_quadratic, _positive), _quadratic_gradient),
    "indefinite quadratic": Family(partial(_quadratic, _of_both_signs), _quadratic_gradient),
    "logistic": Family(partial(_labelled, 1 / 4), _logistic_gradient, 1.0),
    # The most that the second derivative of the sigmoid can be:
    "sigmoid": Family(partial(_labelled, 3**-0.5 / 6), _sigmoid_gradient, 1 / 4),
}


def draw(name: str, problems: int, clients: int, seed: int = 0) -> Problem:
    """So many problems of a family, along a leading axis."""
    rng = np.random.default_rng([seed, clients, *name.encode()])
    drawn = [FAMILIES[name].draw(rng, clients) for _ in range(problems)]
    return jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *drawn)


def gradient_bounds(slope: float, problems: Problem) -> Floats:
    """For each problem of a classifier, a length that no client's gradient exceeds."""
    return slope * np.linalg.norm(problems.data, axis=-1).mean(-1).max(-1)


def curvature(gradient: Gradient, problem: Problem, iterations: int = 30) -> Array:
    """The largest absolute eigenvalue of any client's Hessian at the start, by power iteration."""

    def of_client(data: Any) -> Array:
        def product(vector: Array) -> Array:
            return jax.jvp(partial(gradient, data), (problem.start,), (vector,))[1]

        def body(_: Any, vector: Array) -> Array:
            image = product(vector)
            return image / jnp.linalg.norm(image)

        first = random.normal(random.key(0), problem.start.shape)
        found = jax.lax.fori_loop(0, iterations, body, first / jnp.linalg.norm(first))
        return jnp.linalg.norm(product(found))

    return jax.lax.map(of_client, problem.data).max()


class Learnt(NamedTuple):
    """A problem of data, as the library takes it and as this package does; weights are equal."""

    model: Model  # its parameters are one vector
    clients: list[tuple[Any, Any]]
    loss: Callable[[Any, Any], Any]
    problem: Problem
    gradient: Gradient


def _softplus(outputs: Array, y: Array) -> Array:
    """The logistic loss of inputs that have the sign of their label."""
    return jax.nn.softplus(-outputs)


def classifier(clients: int, seed: int) -> Learnt:
    """A logistic problem."""
    drawn = jax.tree.map(lambda leaf: leaf[0], draw("logistic", 1, clients, seed))
    problem = drawn._replace(weights=jnp.full_like(drawn.weights, 1 / clients))
    held = [(np.asarray(x), np.zeros(EXAMPLES)) for x in problem.data]
    model = Model(lambda key: problem.start, lambda w, x: x @ w)
    return Learnt(model, held, _softplus, problem, _logistic_gradient)


def flat(layers: Model, seed: int) -> tuple[Array, Callable[[Array, Array], Array]]:
    """A model's first parameters as one vector in float64, and the model of such a vector."""
    params = layers.init(random.key(seed))
    start, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf.astype("float64"), params))
    return start, lambda w, x: layers.apply(unravel(w), x)


def dealt(clients: int, examples: int, seed: int) -> list[tuple[Floats, npt.NDArray[np.int32]]]:
    """Clients with so many digits each, of few classes, as dealt out by Dirichlet(0.3)."""
    whole = digits.load()
    rows = partition.dirichlet(whole.train_y, clients, 0.3, seed)
    rng = np.random.default_rng(seed)
    held = [rng.choice(each, examples, replace=len(each) < examples) for each in rows]
    return [(whole.train_x[each] / 16.0, whole.train_y[each]) for each in held]


def network(clients: int, examples: int, seed: int) -> Learnt:
    """The small network in float64 without dropout, and clients with so many digits each."""
    held = dealt(clients, examples, seed)
    start, apply = flat(cnn(held[0][0].shape[1], 1, digits.NUM_CLASSES), seed)

    def gradient(data: tuple[Array, Array], w: Array) -> Array:
        x, y = data
        return jax.grad(lambda w: losses.cross_entropy(apply(w, x), y).mean())(w)

    x, y = (jnp.asarray(np.stack(part)) for part in zip(*held, strict=True))
    problem = Problem((x, y), jnp.full(clients, 1 / clients), start)
    model = Model(lambda key: start, apply)
    return Learnt(model, held, losses.cross_entropy, problem, gradient)
