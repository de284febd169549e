"""FedOpt (Reddi et al., ICLR 2021): FedAvg's clients, and an optimiser at the server.

    client i:  as in FedAvg: plain SGD from W,  upload  N_i (y - W),  N_i
    server:    D = sum_i N_i (y_i - W) / sum_i N_i        where -D takes the place of the gradient
      sgdm     m <- beta1 m + server_lr D
               W <- W + m
      adagrad  v <- v + D²
               W <- W + server_lr D / (sqrt(v) + tau)
      adam     m <- beta1 m + (1 - beta1) D
               v <- beta2 v + (1 - beta2) D²
               W <- W + s m / (sqrt(v) + tau)
      yogi     as adam, but  v <- v - (1 - beta2) D² sign(v - D²)

`m` starts at 0.

Option (adam, adagrad, yogi):
    form      paper: `s = server_lr`, without bias correction, and `v` starts at `tau²`, the least
              value that the paper allows. keras: as in the authors' code. `v` starts at 0 and, for
              Adam and Yogi after `r` rounds,
              `s = server_lr sqrt(1 - beta2^(r+2)) / (1 - beta1^(r+2))`, which corrects the bias
              of `m` and `v` and leaves `tau` as it is ("epsilon hat"). The exponent is not
              `r + 1`: that code creates the optimiser's state by an update with a zero gradient,
              which counts. `beta2` is then 0.999 by default, as in Keras.
Options (sgdm):
    form      keras: as above, FedAvgM (Hsu et al. 2019), whose momentum is not damped. All
              published server rates are meant for it. paper: `m <- beta1 m + (1 - beta1) D` and
              `W <- W + server_lr m`, damped like the momentum of the others. This is the same
              with a ``server_lr`` that is `1 / (1 - beta1)` times as large, and so is its
              default.
    direction momentum: as above. quasi-hyperbolic: the damped `m` is replaced in the step by
              `nu m + (1 - nu) D` (Ma and Yarats, ICLR 2019). nesterov: the same with `nu = beta1`,
              which is Nesterov's momentum.
Option (adagrad):
    server_momentum  none: as above. step: `m <- beta1 m + (1 - beta1) D`, and the step is along
              `m`, as in FedAdam. gradient: `m` also takes the place of `D` in `v <- v + m²`, as
              the momentum does in FedDA+AdaGrad. Both are controls for FedDA and in no paper.

The default rates and `tau` are the best that the authors found for EMNIST characters (their code,
optimization/docs/hyperparameters.md). The paper form is algorithm 2 of the paper, as other
implementations interpret it: `v` starts at `tau²` or above (conflux-fl/conflux-fl,
crates/conflux-core/src/optimization.rs; wenh06/fl-sim), `beta1` is 0.9 and `beta2` is 0.99
(conflux-fl; Flower). The mean is plain in the paper and weighted by the number of examples in the
authors' code.

Weighting: by the number of examples. Clients keep nothing; the server keeps `W`, `m` and `v` (and
`r`).
Communication, in models: 1 down, 1 up.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from fedda.algorithms import fedavg
from fedda.algorithms.registry import Reduction, Variant
from fedda.core import local, tree
from fedda.core.algorithm import Algorithm, Decay, NonNegative, Phase, Positive
from fedda.core.tree import PyTree


class SGDM(NamedTuple):
    client_lr: Positive = 10**-1.5
    server_lr: Positive = 10**-0.5
    beta1: Decay = 0.9


class DampedSGDM(NamedTuple):
    client_lr: Positive = 10**-1.5
    server_lr: Positive = 10**0.5
    beta1: Decay = 0.9


class QuasiHyperbolic(NamedTuple):
    client_lr: Positive = 10**-1.5
    server_lr: Positive = 10**-0.5
    beta1: Decay = 0.9
    nu: NonNegative = 0.7


class DampedQuasiHyperbolic(NamedTuple):
    client_lr: Positive = 10**-1.5
    server_lr: Positive = 10**0.5
    beta1: Decay = 0.9
    nu: NonNegative = 0.7


class AdaGrad(NamedTuple):
    client_lr: Positive = 10**-1.5
    server_lr: Positive = 10**-1.0
    tau: Positive = 10**-2.0


class MomentumAdaGrad(NamedTuple):
    client_lr: Positive = 10**-1.5
    server_lr: Positive = 10**-1.0
    beta1: Decay = 0.9
    tau: Positive = 10**-2.0


class Adam(NamedTuple):
    client_lr: Positive = 10**-1.5
    server_lr: Positive = 10**-2.5
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    tau: Positive = 10**-4.0


class KerasAdam(NamedTuple):
    client_lr: Positive = 10**-1.5
    server_lr: Positive = 10**-2.5
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    tau: Positive = 10**-4.0


class State(NamedTuple):
    params: PyTree
    momentum: PyTree = ()  # m
    second: PyTree = ()  # v
    rounds: PyTree = ()  # r, as a floating-point number, because it is an exponent


Form = Literal["paper", "keras"]
Direction = Literal["momentum", "nesterov", "quasi-hyperbolic"]
ServerMomentum = Literal["none", "step", "gradient"]
Second = Callable[[Any, PyTree, PyTree], PyTree]  # (hp, v, D²) -> v


def with_server(
    Hyper: type[Any],
    init: Callable[[Any, PyTree], State],
    merge: Callable[[Any, State, local.Weighted], State],
) -> Algorithm:
    """Return FedAvg's clients with this server."""
    return Algorithm(Hyper=Hyper, init=init, phases=(Phase(fedavg.send, fedavg.work, merge),))


def start_of_second(hp: Any, form: Form, params: PyTree) -> PyTree:
    start = 0.0 if form == "keras" else hp.tau**2
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, start), params)


def adaptive_step(hp: Any, rate: ArrayLike, params: PyTree, m: PyTree, v: PyTree) -> PyTree:
    """Return params + rate m / (sqrt(v) + tau)."""
    return tree.axpy(rate, tree.over_root(m, v, hp.tau), params)


def sgdm(form: Form = "keras", direction: Direction = "momentum") -> Algorithm:
    """FedAvgM (Hsu et al. 2019), FedOpt with SGDM: momentum at the server."""
    keras = form == "keras"
    Hyper: type[Any] = SGDM if keras else DampedSGDM
    if direction == "quasi-hyperbolic":
        Hyper = QuasiHyperbolic if keras else DampedQuasiHyperbolic

    def init(hp: Any, params: PyTree) -> State:
        return State(params, tree.zeros_like(params))

    def merge(hp: Any, state: State, total: local.Weighted) -> State:
        delta = local.mean(total)
        if keras:
            m = tree.add(tree.scale(hp.beta1, state.momentum), tree.scale(hp.server_lr, delta))
            rate, latest = 1.0, tree.scale(hp.server_lr / (1 - hp.beta1), delta)
        else:
            m = tree.blend(hp.beta1, state.momentum, delta)
            rate, latest = hp.server_lr, delta
        if direction == "momentum":
            return State(tree.axpy(rate, m, state.params), m)
        nu = hp.beta1 if direction == "nesterov" else hp.nu
        return State(tree.axpy(rate, tree.blend(nu, m, latest), state.params), m)

    return with_server(Hyper, init, merge)


def adagrad(form: Form = "paper", server_momentum: ServerMomentum = "none") -> Algorithm:
    """FedAdagrad (Reddi et al. 2021): AdaGrad at the server, without momentum."""
    plain = server_momentum == "none"

    def init(hp: Any, params: PyTree) -> State:
        m = () if plain else tree.zeros_like(params)
        return State(params, m, start_of_second(hp, form, params))

    def merge(hp: Any, state: State, total: local.Weighted) -> State:
        delta = local.mean(total)
        m = delta if plain else tree.blend(hp.beta1, state.momentum, delta)
        squared = m if server_momentum == "gradient" else delta
        v = tree.add(state.second, tree.square(squared))
        params = adaptive_step(hp, hp.server_lr, state.params, m, v)
        return State(params, () if plain else m, v)

    return with_server(AdaGrad if plain else MomentumAdaGrad, init, merge)


def adam_like(second: Second, form: Form) -> Algorithm:
    """Return Adam with this update of v."""
    keras = form == "keras"

    def init(hp: Any, params: PyTree) -> State:
        v = start_of_second(hp, form, params)
        return State(params, tree.zeros_like(params), v, jnp.zeros(()) if keras else ())

    def merge(hp: Any, state: State, total: local.Weighted) -> State:
        delta = local.mean(total)
        m = tree.blend(hp.beta1, state.momentum, delta)
        v = second(hp, state.second, tree.square(delta))
        rate, rounds = hp.server_lr, state.rounds
        if keras:
            updates = rounds + 2  # including this one and the first one, with a zero gradient
            rate = rate * jnp.sqrt(1 - hp.beta2**updates) / (1 - hp.beta1**updates)
            rounds = rounds + 1
        return State(adaptive_step(hp, rate, state.params, m, v), m, v, rounds)

    return with_server(KerasAdam if keras else Adam, init, merge)


def adam(form: Form = "paper") -> Algorithm:
    """FedAdam (Reddi et al. 2021): Adam at the server."""
    return adam_like(lambda hp, v, squares: tree.blend(hp.beta2, v, squares), form)


def yogi(form: Form = "paper") -> Algorithm:
    """FedYogi (Reddi et al. 2021): Adam at the server, but v changes by at most (1 - beta2) D²."""

    def second(hp: Any, v: PyTree, squares: PyTree) -> PyTree:
        signed = jax.tree.map(lambda v, square: square * jnp.sign(v - square), v, squares)
        return tree.axpy(hp.beta2 - 1, signed, v)

    return adam_like(second, form)


PAPER = "Reddi et al. 2021"
variants = {
    "fedopt-sgdm": Variant(
        sgdm, "FedAvgM", "Hsu et al. 2019", "FedOpt with momentum at the server", down=1, up=1
    ),
    "fedopt-adam": Variant(adam, "FedAdam", PAPER, "Adam at the server", down=1, up=1),
    "fedopt-adagrad": Variant(adagrad, "FedAdagrad", PAPER, "AdaGrad at the server", down=1, up=1),
    "fedopt-yogi": Variant(yogi, "FedYogi", PAPER, "Yogi at the server", down=1, up=1),
}
# FedAvg has other default rates.
_rates = {"client_lr": 0.1, "server_lr": 1.0}
reductions = [
    Reduction("fedopt-sgdm", {"beta1": 0.0} | _rates, "fedavg", _rates),
    Reduction("fedopt-sgdm", {"beta1": 0.0} | _rates, "fedavg", _rates, {"form": "paper"}),
    # Without weight on the momentum, the server's step is FedAvg's, times 1 / (1 - beta1).
    Reduction(
        "fedopt-sgdm",
        {"nu": 0.0, "beta1": 0.5, "client_lr": 0.1, "server_lr": 0.5},
        "fedavg",
        _rates,
        {"direction": "quasi-hyperbolic"},
    ),
    *(
        Reduction("fedopt-adagrad", {"beta1": 0.0}, "fedopt-adagrad", {}, {"server_momentum": kind})
        for kind in ("step", "gradient")
    ),
]
