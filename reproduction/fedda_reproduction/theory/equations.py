"""Optimisers as differential equations, centralised and decomposed among clients.

With the step size eta, the paper's equations in the time tau = eta * steps are

    GD:       W' = -g(W)
    SGDM:     eta m' = (1 - beta1) (g(W) - m),  W' = -m
    Adam:     m as above,  eta v' = (1 - beta2) (g(W)² - v),  W' = -m^ / (sqrt(v^) + eps)
    AdaGrad:  eta v' = g(W)²,  W' = -g(W) / (sqrt(v) + eps)

where m^ = m / (1 - beta1^(tau/eta + 1)), and v^ likewise: the paper's exponent tau counts no steps,
and its factor eta in Adam's W' would count eta twice. Decomposed among clients with weights p_i,
W = sum p_i W_i and m = sum p_i m_i:

    precise:    every g_i is taken at the common W, and g in g² is the mean of the g_i
    local:      every client follows the equations by itself: g_i at W_i, g_i² in its v
    decoupled:  W_i' = -g_i(W_i); m_i and v as in `precise`, but of g_i(W_i); W' is of those

An optimiser is Euler's scheme with the step eta, in which W moves by the updated m and v.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
from jax import Array, lax

from fedda_reproduction.theory.problems import Problem, over_problems

METHODS = ("gd", "sgdm", "adam", "adagrad")
DECOMPOSITIONS = ("precise", "local", "decoupled")
LOCAL_STEPS = (5, 10, 20)  # the paper's range of T
POINTS = 21  # times of a solution; always as many, so that it is compiled once


class Hyper(NamedTuple):
    """Step size and constants of the optimisers; plain numbers or traced scalars."""

    eta: Any
    beta1: Any = 0.9
    beta2: Any = 0.99
    eps: Any = 0.1


class State(NamedTuple):
    """Solution of an equation at one time. All fields but `model` have one row per client."""

    clients: Array  # W_i
    momentum: Array  # m_i
    second: Array  # v_i
    model: Array  # W


States = list[State]  # of several equations


class Equation(NamedTuple):
    """One differential equation, of one method and one decomposition."""

    method: str
    decomposition: str
    gradients: Callable[[Array], Array]  # [clients, d] -> each client's gradient at its row
    weights: Array
    hyper: Hyper


def decomposed(method: str, decomposition: str, problem: Problem, hyper: Hyper) -> Equation:
    """Return a method's equation, decomposed among the clients of a problem."""
    gradients = partial(jax.vmap(problem.gradient), problem.data)
    return Equation(method, decomposition, gradients, problem.weights, hyper)


def centralised(method: str, problem: Problem, hyper: Hyper) -> Equation:
    """Return a method's equation with all data in one place: g = sum p_i g_i."""

    def mean_gradient(points: Array) -> Array:
        of_clients = jax.vmap(problem.gradient, (0, None))(problem.data, points[0])
        return (problem.weights @ of_clients)[None]

    return Equation(method, "precise", mean_gradient, jnp.ones_like(problem.weights[:1]), hyper)


def initial(equation: Equation, model: Array, momentum: Array | None = None) -> State:
    """Return the state in which all clients are at `model`, with equal momentum or none."""
    rows = jnp.repeat(model[None], equation.weights.shape[0], 0)
    m = jnp.zeros_like(rows) if momentum is None else jnp.broadcast_to(momentum[None], rows.shape)
    return State(clients=rows, momentum=m, second=jnp.zeros_like(rows), model=model)


def derivative(equation: Equation, tau: Any, state: State, ahead: Any = 0.0) -> State:
    """Return the derivative of the state by tau.

    W_i' and W' are those at the m and v that are reached after the time `ahead`: 0 in the
    differential equation, one step in Euler's scheme.
    """
    method, decomposition, gradients, weights, hp = equation
    at_model = jnp.broadcast_to(state.model[None], state.clients.shape)
    g = gradients(at_model if decomposition == "precise" else state.clients)
    mean = jnp.broadcast_to((weights @ g)[None], g.shape)
    squared = jnp.square(g if decomposition == "local" else mean)
    first = second = jnp.zeros_like(g)
    if method in ("sgdm", "adam"):
        first = (1 - hp.beta1) / hp.eta * (g - state.momentum)
    if method == "adam":
        second = (1 - hp.beta2) / hp.eta * (squared - state.second)
    elif method == "adagrad":
        second = squared / hp.eta
    m, v = state.momentum + ahead * first, state.second + ahead * second
    if method == "gd":
        moves = g
    elif method == "sgdm":
        moves = m
    elif method == "adam":
        steps = tau / hp.eta + 1
        moves = m / (1 - hp.beta1**steps) / (jnp.sqrt(v / (1 - hp.beta2**steps)) + hp.eps)
    else:
        moves = g / (jnp.sqrt(v) + hp.eps)
    clients = g if decomposition == "decoupled" else moves
    return State(clients=-clients, momentum=first, second=second, model=-(weights @ moves))


def euler_step(equation: Equation, tau: Any, state: State, h: Any = None) -> State:
    """Return the state after one step of length h; with h = eta, a step of the optimiser."""
    h = equation.hyper.eta if h is None else h
    rates = derivative(equation, tau, state, ahead=h)
    return jax.tree.map(lambda value, rate: value + h * rate, state, rates)


def euler(equation: Equation, state: State, number: Any, h: Any = None) -> State:
    """Return the state after `number` Euler steps from the time 0; `number` may be traced."""
    h = equation.hyper.eta if h is None else h

    def body(t: Array, state: State) -> State:
        return euler_step(equation, t.astype(state.model.dtype) * h, state, h)

    return lax.fori_loop(0, number, body, state)


def follow(
    equations: Sequence[Equation], states: States, number: int, watch: Callable[[States], Array]
) -> Array:
    """Take optimiser steps with several equations; return `watch(states)` after every step."""

    def body(states: States, t: Array) -> tuple[States, Array]:
        pairs = zip(equations, states, strict=True)
        states = [euler_step(one, t * one.hyper.eta, state) for one, state in pairs]
        return states, watch(states)

    return lax.scan(body, states, jnp.arange(float(number)))[1]


def observed(equation: Equation, state: State) -> Array:
    """Return m = sum p_i m_i and W, as the server would see them: [2, d]."""
    return jnp.stack([equation.weights @ state.momentum, state.model])


@partial(over_problems, static=("method", "rtol"))
def solutions(
    problem: Problem, *, method: str, hyper: Hyper, times: Array, rtol: float = 1e-10
) -> Any:
    """Solve the centralised equation and its decompositions to high accuracy.

    Args:
        problem: Problems along a leading axis.
        method: One of `METHODS`.
        hyper: Hyper-parameters.
        times: Times tau at which to return the solution; the first is the start.
        rtol: Relative tolerance of the explicit Runge-Kutta method of order 5.

    Returns:
        m and W, [problems, times, 4, 2, d]: centralised first, then as in `DECOMPOSITIONS`.
    """
    equations = [centralised(method, problem, hyper)]
    equations += [decomposed(method, name, problem, hyper) for name in DECOMPOSITIONS]

    def field(tau: Any, states: States, _: None) -> States:
        pairs = zip(equations, states, strict=True)
        return [derivative(equation, tau, state) for equation, state in pairs]

    def watch(tau: Any, states: States, _: None) -> Array:
        return jnp.stack([observed(*pair) for pair in zip(equations, states, strict=True)])

    return diffrax.diffeqsolve(
        terms=diffrax.ODETerm(field),
        solver=diffrax.Tsit5(),
        t0=times[0],
        t1=times[-1],
        dt0=hyper.eta / 10,
        y0=[initial(equation, problem.start) for equation in equations],
        saveat=diffrax.SaveAt(ts=times, fn=watch),
        stepsize_controller=diffrax.PIDController(rtol=rtol, atol=1e-3 * rtol),
        max_steps=100_000,
        adjoint=diffrax.ForwardMode(),
    ).ys


@partial(over_problems, static=("method",))
def euler_solutions(problem: Problem, *, method: str, hyper: Hyper, number: Any, h: Any) -> Array:
    """Return m and W after `number` centralised Euler steps of length h: [problems, 2, d]."""
    equation = centralised(method, problem, hyper)
    return observed(equation, euler(equation, initial(equation, problem.start), number, h))
