"""FedDA (Jin et al., ICML 2022): plain local SGD, and a global momentum decoupled from it.

    client i:  w = W;  m = M;  P = 0;  for every local step:
                   g = g_i(w; batch) + mu (w - W)
                   w <- w - client_lr * g           this step does not use the momentum
                   m <- beta1 m + (1 - beta1) g
                   P <- P + m
               upload  N_i S,  N_i m,  N_i          where S is the sum of its g
    server:    S, m = the means of S_i, m_i weighted by N_i;  r counts the rounds before this one
               P = S + beta1 / (1 - beta1) (M - m)  which is the mean of the P_i
               G = (P - beta1 M) / (1 - beta1)      the gradient that would have moved M to P
      sgdm     W <- W - server_lr client_lr P
      adam     V <- beta2 V + (1 - beta2) G²
               W <- W - s (P / (1 - beta1^(r+1))) / (sqrt(V / (1 - beta2^(r+1))) + e)
      adagrad  V <- V + G²
               W <- W - s G / (sqrt(V) + e)
    server:    M <- m                               for all three; M and V start at 0

``mu`` above 0 is FedDA with FedProx. The momentum is linear in the gradients, so the mean of the
clients' momenta is the momentum of their mean gradients. With one full-batch step and all
clients, a round is exactly one step of the centralised optimiser.

Options (all):
    sends     both: the server sends `W` and `M`. model: it sends `W` alone. Clients then start at
              `m = 0` and upload `beta1^T` too, and the server adds `beta1^T M`, which gives the
              same numbers because `m` is linear in `M`. Half as much goes down, and every upload
              depends on this round alone.
    beta1_per step: as above. round: the momentum decays by `beta1` in a round, whatever the
              number of local steps: `beta1^(1/T)` takes the place of `beta1` on a client with `T`
              steps, and at the server with `T` the clients' mean. The bias correction by
              rounds keeps `beta1`, which is then that of FedAvgM. It is in no paper.
    momentum  kept: as above. restarted: `M <- 0` after every round, an ablation. The momentum must
              then grow again in every round, so the server takes shorter steps.
Options (adam, adagrad):
    units     grad: `s = server_lr client_lr` and `e = eps`, as printed. delta: `s = server_lr`
              and `e = eps / client_lr`, as in FedOpt, whose momentum is a mean of model
              differences.
    gradient  momentum: `G` as above. sum: `G` is the sum of the round's gradients, an ablation.
Option (adam):
    bias      rounds: `P` is divided by `1 - beta1^(r+1)`. steps: `P` is divided by its value per
              step if all gradients since the start of the run had been 1. With `T` steps on every
              client, that is the mean of `1 - beta1^k` over `k = r T + 1 .. r T + T`.

Our interpretation, where the paper is ambiguous or misprinted: the exponents of the bias
corrections are `r + 1`; the printed `r` divides by 0 in the first round. The step divides by the
root of the corrected new `V`; the paper prints both forms, and only this one makes a full-batch
round one step of Adam. `P = beta1 M + (1 - beta1) G` defines `G`; it is printed without `M`.
``client_lr`` is applied once, at the server or in the momentum, not twice. Both means are over the
cohort, weighted by `N_i`. `eps` is added outside the root.

Weighting: by the number of examples. Clients keep nothing; the server keeps `W`, `M` (and `V`,
`r`).
Communication, in models: 2 down, 2 up. (With sends=model: 1 down, 2 up.)
"""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedda.algorithms.registry import Reduction, Variant
from fedda.core import local, tree
from fedda.core.algorithm import Algorithm, Decay, NonNegative, Phase, Positive, Seen
from fedda.core.task import Batch, Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shard

Sends = Literal["both", "model"]
Beta1Per = Literal["step", "round"]
Momentum = Literal["kept", "restarted"]


class SGDM(NamedTuple):
    client_lr: Positive = 0.1
    server_lr: Positive = 1.0
    beta1: Decay = 0.9
    mu: NonNegative = 0.0


class AdaGrad(NamedTuple):
    client_lr: Positive = 0.1
    server_lr: Positive = 0.1
    beta1: Decay = 0.9
    eps: Positive = 0.1
    mu: NonNegative = 0.0


class Adam(NamedTuple):
    client_lr: Positive = 0.1
    server_lr: Positive = 0.1
    beta1: Decay = 0.9
    beta2: Decay = 0.99
    eps: Positive = 0.1
    mu: NonNegative = 0.0


class State(NamedTuple):
    params: PyTree
    momentum: PyTree
    second: PyTree = ()  # V
    rounds: PyTree = ()  # r, as a floating-point number, because it is an exponent
    unfilled: PyTree = ()  # the weight of the initial value 0 in M


class Message(NamedTuple):
    params: PyTree
    momentum: PyTree = ()


class Upload(NamedTuple):
    gradients: PyTree  # S
    momentum: PyTree  # m
    steps: local.Counter = local.Counter(())  # T, the number of local steps
    decay: local.Counter = local.Counter(())  # beta1^T


def send(hp: Any, state: State) -> Message:
    return Message(state.params, state.momentum)


def send_model(hp: Any, state: State) -> Message:
    return Message(state.params)


def work(
    hp: Any,
    task: Task,
    message: Message,
    memory: PyTree,
    shard: Shard,
    key: Array,
    sends: Sends = "both",
    beta1_per: Beta1Per = "step",
    count_steps: bool = False,
) -> tuple[local.Weighted, PyTree, Seen]:
    batches = task.batches(shard, key)
    steps = jnp.asarray(batches.steps, jnp.result_type(float))
    beta1 = hp.beta1 if beta1_per == "step" else hp.beta1 ** (1 / jnp.maximum(steps, 1))

    def step(carry: tuple[PyTree, PyTree], batch: Batch) -> tuple[Any, Seen]:
        S, m = carry
        w = tree.axpy(-hp.client_lr, S, message.params)
        gradient, seen = task.gradient(w, batch)
        g = tree.axpy(hp.mu, tree.sub(w, message.params), gradient)
        return (tree.add(S, g), tree.blend(beta1, m, g)), seen

    zero = tree.zeros_like(message.params)
    m = message.momentum if sends == "both" else zero
    # P follows from S and m, and w from W and S, so the steps do not carry them. S is not computed
    # from w: small steps are lost in the rounding of w, and P, a difference, could change its sign.
    (S, m), seen = local.steps(step, (zero, m), batches)
    counted = count_steps or beta1_per == "round"
    decay = beta1**steps if count_steps or sends == "model" else ()
    upload = Upload(S, m, local.Counter(steps if counted else ()), local.Counter(decay))
    return local.weighted(shard, upload), memory, seen


def mean(sends: Sends, state: State, total: local.Weighted) -> Upload:
    """Return the mean upload. If clients do not get M, its part of their momenta is added."""
    upload: Upload = local.mean(total)
    if sends == "both":
        return upload
    momentum = tree.axpy(upload.decay.value, state.momentum, upload.momentum)
    return upload._replace(momentum=momentum)


def phase(sends: Sends, beta1_per: Beta1Per, work: Any, merge: Any) -> Phase:
    work = partial(work, sends=sends, beta1_per=beta1_per)
    return Phase(send if sends == "both" else send_model, work, merge)


def of_a_step(hp: Any, beta1_per: Beta1Per, upload: Upload) -> Any:
    """Return beta1 of a local step, for the mean number of steps if it is given per round."""
    return hp.beta1 if beta1_per == "step" else hp.beta1 ** (1 / upload.steps.value)


def moved(beta1: Any, state: State, upload: Upload) -> PyTree:
    """P: the sum of the momenta after every step, by m's recursion."""
    change = tree.sub(state.momentum, upload.momentum)
    return tree.axpy(beta1 / (1 - beta1), change, upload.gradients)


def equivalent_gradient(beta1: Any, state: State, P: PyTree) -> PyTree:
    """G: the gradient that would have moved the momentum from M to P."""
    return tree.scale(1 / (1 - beta1), tree.axpy(-beta1, state.momentum, P))


def following(momentum: Momentum, state: State, upload: Upload) -> PyTree:
    """M of the next round."""
    return upload.momentum if momentum == "kept" else tree.zeros_like(state.momentum)


def sgdm(
    sends: Sends = "both", beta1_per: Beta1Per = "step", momentum: Momentum = "kept"
) -> Algorithm:
    """FedDA+SGDM (Jin et al. 2022): the server moves by a decoupled global momentum."""

    def init(hp: SGDM, params: PyTree) -> State:
        return State(params, tree.zeros_like(params))

    def merge(hp: SGDM, state: State, total: local.Weighted) -> State:
        upload = mean(sends, state, total)
        beta1 = of_a_step(hp, beta1_per, upload)
        P = moved(beta1, state, upload)
        params = tree.axpy(-hp.server_lr * hp.client_lr, P, state.params)
        return State(params, following(momentum, state, upload))

    return Algorithm(Hyper=SGDM, init=init, phases=(phase(sends, beta1_per, work, merge),))


Units = Literal["grad", "delta"]
Gradient = Literal["momentum", "sum"]


def adaptive_step(hp: Any, units: Units, params: PyTree, direction: PyTree, v: PyTree) -> PyTree:
    """Params - s direction / (sqrt(v) + e)."""
    rate, eps = (
        (hp.server_lr * hp.client_lr, hp.eps)
        if units == "grad"
        else (hp.server_lr, hp.eps / hp.client_lr)
    )
    return tree.axpy(-rate, tree.over_root(direction, v, eps), params)


def adagrad(
    units: Units = "grad",
    gradient: Gradient = "momentum",
    sends: Sends = "both",
    beta1_per: Beta1Per = "step",
    momentum: Momentum = "kept",
) -> Algorithm:
    """FedDA+AdaGrad (Jin et al. 2022): a decoupled global momentum, fed to AdaGrad."""

    def init(hp: AdaGrad, params: PyTree) -> State:
        return State(params, tree.zeros_like(params), tree.zeros_like(params))

    def merge(hp: AdaGrad, state: State, total: local.Weighted) -> State:
        upload = mean(sends, state, total)
        beta1 = of_a_step(hp, beta1_per, upload)
        P = moved(beta1, state, upload)
        G = upload.gradients if gradient == "sum" else equivalent_gradient(beta1, state, P)
        V = tree.add(state.second, tree.square(G))
        params = adaptive_step(hp, units, state.params, G, V)
        return State(params, following(momentum, state, upload), V)

    return Algorithm(Hyper=AdaGrad, init=init, phases=(phase(sends, beta1_per, work, merge),))


def adam(
    units: Units = "grad",
    gradient: Gradient = "momentum",
    bias: Literal["rounds", "steps"] = "rounds",
    sends: Sends = "both",
    beta1_per: Beta1Per = "step",
    momentum: Momentum = "kept",
) -> Algorithm:
    """FedDA+Adam (Jin et al. 2022): a decoupled global momentum, fed to Adam."""
    count_steps = bias == "steps"

    def init(hp: Adam, params: PyTree) -> State:
        unfilled = jnp.ones(()) if count_steps else ()
        zeros = tree.zeros_like(params)
        return State(params, zeros, zeros, jnp.zeros(()), unfilled)

    def merge(hp: Adam, state: State, total: local.Weighted) -> State:
        upload = mean(sends, state, total)
        beta1 = of_a_step(hp, beta1_per, upload)
        P = moved(beta1, state, upload)
        G = upload.gradients if gradient == "sum" else equivalent_gradient(beta1, state, P)
        rounds, unfilled = state.rounds + 1, state.unfilled
        if count_steps:
            # With gradients of 1, m after t steps is 1 - unfilled beta1^t, and P the sum of these.
            steps, decay = upload.steps.value, upload.decay.value
            missing = unfilled * beta1 * (1 - decay) / (1 - beta1)
            correction = 1 - missing / steps
            if momentum == "kept":
                unfilled = unfilled * decay
        else:
            correction = 1 - hp.beta1**rounds
        V = tree.blend(hp.beta2, state.second, tree.square(G))
        direction = tree.scale(1 / correction, P)
        corrected = tree.scale(1 / (1 - hp.beta2**rounds), V)
        params = adaptive_step(hp, units, state.params, direction, corrected)
        return State(params, following(momentum, state, upload), V, rounds, unfilled)

    counting_work = partial(work, count_steps=count_steps)
    return Algorithm(Hyper=Adam, init=init, phases=(phase(sends, beta1_per, counting_work, merge),))


PAPER = "Jin et al. 2022"
variants = {
    "fedda-sgdm": Variant(sgdm, "FedDA+SGDM", PAPER, "decoupled global momentum", down=2, up=2),
    "fedda-adam": Variant(adam, "FedDA+Adam", PAPER, "decoupled momentum, Adam", down=2, up=2),
    "fedda-adagrad": Variant(
        adagrad, "FedDA+AdaGrad", PAPER, "decoupled momentum, fed to AdaGrad", down=2, up=2
    ),
}
reductions = [Reduction("fedda-sgdm", {"beta1": 0.0, "server_lr": 1.0}, "fedavg")]
