"""Optimisers as differential equations, whole and divided among clients.

With the step size eta, the paper's equations in the time tau = eta * steps are

    GD:       W' = -g(W)
    SGDM:     eta m' = (1 - beta1) (g(W) - m),  W' = -m
    Adam:     m as above,  eta v' = (1 - beta2) (g(W)² - v),  W' = -m^ / (sqrt(v^) + eps)
    AdaGrad:  eta v' = g(W)²,  W' = -g(W) / (sqrt(v) + eps)

where m^ = m / (1 - beta1^(tau/eta + 1)), and v^ likewise: the paper's exponent tau counts no steps,
and its factor eta in Adam's W' would count eta twice. Divided among clients with weights p_i,
W = sum p_i W_i and m = sum p_i m_i:

    precise:    every g_i is taken at the common W, and g in g² is the mean of the g_i
    local:      every client follows the equations on its own: g_i at W_i, g_i² in its v
    decoupled:  W_i' = -g_i(W_i); m_i and v as in `precise`, but of g_i(W_i); W' is of those

An optimiser is Euler's scheme with the step eta, in which W moves by the m and v just found.
"""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedda.errors import InputError
from fedda_reproduction.theory.problems import Gradient, Problem

METHODS = ("gd", "sgdm", "adam", "adagrad")
KINDS = ("precise", "local", "decoupled")


class Hyper(NamedTuple):
    eta: Any
    beta1: Any = 0.9
    beta2: Any = 0.99
    eps: Any = 0.1


class State(NamedTuple):
    """Rows of `clients`, `momentum` and `second` are the clients'."""

    clients: Array  # W_i
    momentum: Array  # m_i
    second: Array  # v_i
    model: Array  # W


class Flow(NamedTuple):
    """One differential equation."""

    method: str
    kind: str
    gradients: Callable[[Array], Array]  # points [clients, d] -> each client's at its own
    weights: Array
    hyper: Hyper


def divided(method: str, kind: str, gradient: Gradient, problem: Problem, hyper: Hyper) -> Flow:
    return Flow(method, kind, partial(jax.vmap(gradient), problem.data), problem.weights, hyper)


def centralised(method: str, gradient: Gradient, problem: Problem, hyper: Hyper) -> Flow:
    """All clients' data in one place: one client, whose gradient is the weighted mean."""

    def mean_gradient(points: Array) -> Array:
        of_clients = jax.vmap(gradient, (0, None))(problem.data, points[0])
        return (problem.weights @ of_clients)[None]

    return Flow(method, "precise", mean_gradient, jnp.ones_like(problem.weights[:1]), hyper)


def begin(flow: Flow, model: Array, momentum: Array | None = None) -> State:
    """Every client at the same point with the same momentum, or none."""
    rows = jnp.repeat(model[None], flow.weights.shape[0], 0)
    m = jnp.zeros_like(rows) if momentum is None else jnp.broadcast_to(momentum[None], rows.shape)
    return State(rows, m, jnp.zeros_like(rows), model)


def _gradients(flow: Flow, state: State) -> Array:
    at_model = jnp.broadcast_to(state.model[None], state.clients.shape)
    return flow.gradients(at_model if flow.kind == "precise" else state.clients)


def _memory_rates(flow: Flow, state: State, g: Array) -> tuple[Array, Array]:
    """The derivatives m' and v'."""
    hp = flow.hyper
    mean = jnp.broadcast_to((flow.weights @ g)[None], g.shape)
    squared = jnp.square(g if flow.kind == "local" else mean)
    if flow.method == "adam":
        second = (1 - hp.beta2) / hp.eta * (squared - state.second)
    elif flow.method == "adagrad":
        second = squared / hp.eta
    else:
        second = jnp.zeros_like(squared)
    if flow.method in ("gd", "adagrad"):
        return jnp.zeros_like(g), second
    return (1 - hp.beta1) / hp.eta * (g - state.momentum), second


def _velocities(flow: Flow, state: State, g: Array, tau: Any) -> tuple[Array, Array]:
    """The derivatives W_i' and W'.

    W' is a mean over clients, as either they share v or each moves by its own.
    """
    hp = flow.hyper
    steps = tau / hp.eta + 1
    if flow.method == "gd":
        moves = g
    elif flow.method == "sgdm":
        moves = state.momentum
    elif flow.method == "adam":
        first = state.momentum / (1 - hp.beta1**steps)
        moves = first / (jnp.sqrt(state.second / (1 - hp.beta2**steps)) + hp.eps)
    else:
        moves = g / (jnp.sqrt(state.second) + hp.eps)
    return -(g if flow.kind == "decoupled" else moves), -(flow.weights @ moves)


def field(flow: Flow, tau: Any, state: State) -> State:
    """The derivative of the state."""
    g = _gradients(flow, state)
    clients, model = _velocities(flow, state, g, tau)
    return State(clients, *_memory_rates(flow, state, g), model)


def euler(flow: Flow, tau: Any, state: State, h: Any = None) -> State:
    """One step of length h; if h is eta, which it is unless given, a step of the optimiser."""
    h = flow.hyper.eta if h is None else h
    g = _gradients(flow, state)
    first, second = _memory_rates(flow, state, g)
    state = state._replace(momentum=state.momentum + h * first, second=state.second + h * second)
    clients, model = _velocities(flow, state, g, tau)
    return state._replace(clients=state.clients + h * clients, model=state.model + h * model)


def steps(flow: Flow, state: State, number: Any, h: Any = None) -> State:
    """The state after so many Euler steps; `number` may be traced."""
    h = flow.hyper.eta if h is None else h

    def body(t: Array, state: State) -> State:
        return euler(flow, t.astype(state.model.dtype) * h, state, h)

    return lax.fori_loop(0, number, body, state)


def momentum(flow: Flow, state: State) -> Array:
    """The mean of the clients' momenta."""
    return flow.weights @ state.momentum


def solve(
    field: Callable[[Any, Any], Any],
    start: Any,
    times: Array,
    first: Any,
    watch: Callable[[Any], Any] = lambda state: state,
    rtol: float = 1e-10,
) -> Any:
    """`watch` of the solution at the times, by an explicit method of order 5 with error control.

    `first` is the length of the first step to try.
    """
    diffrax = extra("diffrax")
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(lambda tau, state, _: field(tau, state)),
        diffrax.Tsit5(),
        times[0],
        times[-1],
        first,
        start,
        saveat=diffrax.SaveAt(ts=times, fn=lambda tau, state, _: watch(state)),
        stepsize_controller=diffrax.PIDController(rtol=rtol, atol=1e-3 * rtol),
        max_steps=100_000,
        adjoint=diffrax.ForwardMode(),
    )
    return solution.ys


def extra(name: str) -> Any:
    """A package that only this part of the library needs."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(
            f"fedda theory needs {name}, which is not installed: pip install 'fedda[theory]'."
        ) from error


def in_float64() -> Any:
    """A context in which JAX computes in float64; elsewhere the library stays in float32."""
    return jax.enable_x64(True)
