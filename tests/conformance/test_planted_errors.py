"""The vectors notice mistakes: each of these lines of a reference, written wrongly, shows.

The first four kinds are planted in the library itself, too.
"""

import importlib
import inspect
import types
from typing import NamedTuple

import numpy as np
import pytest

from conformance import references
from conformance.generate import plain
from conformance.reader import first_difference, read_problem, read_vectors
from helpers.conformance import TOLERANCE, simulated

PROBLEM = read_problem()


def mutated(module, *changes):
    """A module with other source text."""
    text = inspect.getsource(module)
    for old, new in changes:
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {module.__name__}"
        text = text.replace(old, new)
    wrong = types.ModuleType(module.__name__)
    exec(compile(text, module.__file__, "exec"), vars(wrong))
    return wrong


def of_reference(reference, vector):
    visits = PROBLEM.visits(vector.schedule, vector.reduction)
    settings = {**vector.options, **vector.hyper, "clients": len(PROBLEM.clients)}
    with np.errstate(all="ignore"):  # some mistakes divide by zero
        states = references.run(reference, PROBLEM.weights, visits, **settings)
        return [plain(state) for state in states]


def vector_of(algorithm, name="default"):
    (found,) = (vector for vector in read_vectors(algorithm) if vector.name == name)
    return found


class Planted(NamedTuple):
    """A mistake: what is written in place of what, and a vector that it must change."""

    kind: str
    algorithm: str
    old: str
    new: str
    case: str = "default"


MEAN = "import Reference, State, mean"
UNIFORM = (
    "import Reference, State\nfrom numpy import mean as m\nmean = lambda values, _: m(values, 0)"
)
UNIFORM_PLAIN = UNIFORM.replace("State\n", "State, plain_start\n", 1)
PLANTED = [
    # ---- weighting
    Planted("weighting", "fedavg", f"{MEAN}, plain_start", UNIFORM_PLAIN),
    Planted("weighting", "fedda-adam", MEAN, UNIFORM),
    Planted("weighting", "fedopt-sgdm", MEAN, UNIFORM),
    Planted("weighting", "mfl-sgdm", MEAN, UNIFORM),
    Planted("weighting", "mime-sgdm", MEAN, UNIFORM),
    Planted("weighting", "fedlin", MEAN, UNIFORM),
    Planted("weighting", "stem", MEAN, UNIFORM),
    Planted("weighting", "fedlocal-sgdm", f"{MEAN}, plain_start", UNIFORM_PLAIN),
    Planted("weighting", "scaffold", 'if weighting == "examples"', 'if weighting == "uniform"'),
    Planted("weights that sum to 1", "climb", "total + p\n", "total + p * w\n"),
    Planted("weights below 0", "climb", "max(0.0, 1 +", "(1 +"),
    Planted(
        "mean loss by examples",
        "climb",
        "sum(losses) / len(losses)",
        "np.average(losses, weights=[visit.examples for visit in visits])",
    ),
    # ---- bias correction
    Planted("off by one", "fedda-adam", "beta1 ** (r + 1)", "beta1 ** (r + 2)"),
    Planted("off by one", "fedda-adam", "beta2 ** (r + 1)", "beta2 ** (r + 2)"),
    Planted("exponent r as printed", "fedda-adam", "beta1 ** (r + 1)", "beta1**r"),
    Planted("root of V without a hat", "fedda-adam", "np.sqrt(V_hat)", "np.sqrt(V)"),
    Planted("hat of the old V", "fedda-adam", "V_hat = V /", 'V_hat = state["second"] /'),
    Planted(
        "off by one", "fedopt-adam", 'state["rounds"] + 2', 'state["rounds"] + 1', "form=keras"
    ),
    Planted(
        "bias correction",
        "fedopt-adam",
        'if form == "keras":\n        # Keras',
        'if True:\n        state["rounds"] = state.get("rounds", -1)\n        # Keras',
    ),
    Planted("off by one", "mfl-adam", "1 - beta1**t", "1 - beta1 ** (t + 1)"),
    Planted(
        "count restarted",
        "mfl-adam",
        'new["steps"] = float(np.round(new["steps"]))',
        'new["steps"] = 0.0',
    ),
    Planted("count not rounded", "mfl-adam", 'float(np.round(new["steps"]))', 'new["steps"]'),
    Planted("off by one", "mime-adam", "** (r + 1))\n        v_hat", "** (r + 2))\n        v_hat"),
    Planted("off by one", "fedlocal-adam", "1 - beta**k", "1 - beta ** (k + 1)"),
    Planted("no bias correction", "fedlocal-adam", "u / (1 - beta**k)", "u"),
    # ---- stale or wrong momentum
    Planted("stale momentum", "fedda-sgdm", 'new["momentum"] = m', 'new["momentum"] = M'),
    Planted("P carried in place of m", "fedda-adam", 'new["momentum"] = m', 'new["momentum"] = P'),
    Planted(
        "stale momentum",
        "fedopt-adam",
        '"momentum": m, "second": v, **rest',
        '"momentum": state["momentum"], "second": v, **rest',
    ),
    Planted("momentum restarted", "mfl-sgdm", "return new\n", 'return new | {"momentum": 0.0}\n'),
    Planted("stale statistics", "mimelite-sgdm", "**statistics(base, hp, c, state)", "**state"),
    Planted(
        "moving statistics",
        "mimelite-sgdm",
        "y = y - client_lr * direction(",
        "state = {**state, **statistics(base, hp, d, state)}\n"
        "            y = y - client_lr * direction(",
    ),
    Planted("stale direction", "stem", '"direction": d,', '"direction": state["direction"],'),
    Planted("no restart", "fedlocal-sgdm", "y, u, v, q, A = W, 0 * W,", "y, u, v, q, A = W, W,"),
    Planted("damped", "mfl-sgdm", 'damping == "off"', 'damping == "on"'),
    Planted(
        "damped",
        "fedopt-sgdm",
        'beta1 * state["momentum"] + alpha * D',
        'beta1 * state["momentum"] + (1 - beta1) * alpha * D',
    ),
    Planted(
        "undamped",
        "fedopt-adam",
        'm = beta1 * state["momentum"] + (1 - beta1) * D\n    v = second',
        'm = beta1 * state["momentum"] + D\n    v = second',
    ),
    Planted(
        "client_lr twice", "fedda-sgdm", "server_lr * client_lr * P", "server_lr * client_lr**2 * P"
    ),
    # ---- control variates
    Planted("sign", "scaffold", "(c - c_i))", "(c_i - c))"),
    Planted("sign", "fedlin", "at_y - at_x + share * g", "at_y + at_x - share * g"),
    Planted("sign", "mime-sgdm", "- batch.gradient(W) + visit", "+ batch.gradient(W) - visit"),
    Planted(
        "start at the model", "scaffold", '"client_controls": [0 * W]', '"client_controls": [W]'
    ),
    Planted(
        "epochs for steps", "scaffold", "sum(visit.share(batch) for batch in visit.batches)", "2"
    ),
    Planted("forgotten after the visit", "scaffold", "controls[visit.client] = c_new", "pass"),
    Planted("c by the cohort", "scaffold", "/ len(controls)", "/ len(visits)"),
    Planted(
        "c_i from the last point",
        "scaffold",
        "visit.full.gradient(x)",
        "visit.full.gradient(y)",
        "control=I",
    ),
    Planted("plain mean of the c_i", "scaffold", "dC + w * (c_new", "dC + (c_new"),
    Planted("no correction", "mime-sgdm", "- batch.gradient(W) +", "- batch.gradient(y) +"),
    Planted(
        "another batch",
        "stem",
        "batch.gradient(before)",
        "visit.batches[number - 1].gradient(before)",
    ),
    Planted("a for 1 - a", "stem", "(1 - a) * (d", "a * (d"),
    # ---- other lines
    Planted(
        "multipliers of the cohort",
        "climb",
        'multipliers[visit.client] - state["mean_multiplier"]',
        "multipliers[visit.client] - multipliers[[v.client for v in visits]].mean()",
    ),
    Planted("the cohort for all", "climb", "dual_lr / len(multipliers)", "dual_lr / len(visits)"),
    Planted(
        "tau in the root",
        "fedopt-adam",
        'm / (np.sqrt(v) + tau)\n    return {"params": W, "momentum": m, "second": v, **rest}',
        'm / np.sqrt(v + tau**2)\n    return {"params": W, "momentum": m, "second": v, **rest}',
    ),
    Planted(
        "a look ahead too short",
        "fedopt-sgdm",
        '"nesterov": beta1 * m + alpha * D,',
        '"nesterov": beta1 * state["momentum"] + alpha * D,',
        "direction=nesterov",
    ),
    Planted(
        "squares of D",
        "fedopt-adagrad",
        'if server_momentum == "step"',
        'if server_momentum == "gradient"',
        "server_momentum=gradient",
    ),
    Planted(
        "T of the cohort for T of a client",
        "fedda-sgdm",
        "beta1 ** (1 / T) for T in steps]",
        "beta1 ** (1 / np.mean(steps)) for T in steps]",
        "beta1_per=round",
    ),
    Planted("v from 0", "fedopt-yogi", 'settings["tau"] ** 2 if form == "paper" else 0', "0"),
    Planted(
        "v from 0.1",
        "fedopt-adagrad",
        'settings["tau"] ** 2 if form == "paper" else 0',
        "0.1",
        "form=keras",
    ),
    Planted(
        "Yogi's sign",
        "fedopt-yogi",
        "v - (1 - beta2) * D**2 * np.sign",
        "v + (1 - beta2) * D**2 * np.sign",
    ),
    Planted("Yogi's sign of D", "fedopt-yogi", "np.sign(v - D**2)", "np.sign(v - D)"),
    Planted("v restarted", "mfl-adagrad", "return new\n", 'return new | {"second": 0.0}\n'),
    Planted(
        "corrected v in A",
        "fedlocal-adam",
        'p = 1 / (np.sqrt(v) + hp["eps"])\n        else',
        'p = 1 / (np.sqrt(v_hat) + hp["eps"])\n        else',
    ),
    Planted("A is the last q", "fedlocal-adam", "A = A + q", "A = q"),
    Planted(
        "the mean of A",
        "fedlocal-adagrad",
        "delta / mean([1 / A for _, A in ends], visits)",
        "delta * mean([A for _, A in ends], visits)",
    ),
    Planted("proximal term only once", "fedprox", "mu * (y - W)", "0 * mu * (y - W)"),
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda p: f"{p.algorithm}-{p.kind}")
def test_a_planted_error_is_noticed(planted):
    (module,) = (m for m in references.MODULES if planted.algorithm in m.REFERENCES)
    vector = vector_of(planted.algorithm, planted.case)
    right = of_reference(module.REFERENCES[planted.algorithm], vector)
    assert first_difference(vector.rounds, right, TOLERANCE) is None
    wrong = mutated(module, (planted.old, planted.new)).REFERENCES[planted.algorithm]
    params = [{"params": state["params"]} for state in of_reference(wrong, vector)]
    # Seen in the model alone, and far above rounding.
    assert first_difference(vector.rounds, params, 1e-5) is not None


def test_every_algorithm_has_a_planted_error():
    modules = {m for m in references.MODULES for p in PLANTED if p.algorithm in m.REFERENCES}
    assert modules == set(references.MODULES)
    assert {"weighting", "off by one", "stale momentum", "sign"} <= {p.kind for p in PLANTED}


IN_THE_LIBRARY = [
    Planted(
        "weighting",
        "fedavg",
        "local.weighted(shard, tree.sub(y, params))",
        "local.weighted_by(jnp.ones(()), tree.sub(y, params))",
    ),
    Planted(
        "off by one",
        "fedda-adam",
        "correction = 1 - hp.beta1**rounds",
        "correction = 1 - hp.beta1 ** (rounds + 1)",
    ),
    Planted(
        "stale momentum",
        "fedda-sgdm",
        "params = tree.axpy(-hp.server_lr * hp.client_lr, P, state.params)\n"
        "        return State(params, following(momentum, state, upload))",
        "params = tree.axpy(-hp.server_lr * hp.client_lr, P, state.params)\n"
        "        return State(params, state.momentum)",
    ),
    Planted("sign", "scaffold", "tree.sub(server.control, own)", "tree.sub(own, server.control)"),
]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("planted", IN_THE_LIBRARY, ids=lambda p: p.kind)
def test_an_error_planted_in_the_library_is_noticed(planted):
    name = planted.algorithm.partition("-")[0]
    module = importlib.import_module(f"fedda.algorithms.{name}")
    vector = vector_of(planted.algorithm)
    imports = ("from jax import Array\n", "from jax import Array, numpy as jnp\n")
    changes = [(planted.old, planted.new), *([imports] if name == "fedavg" else [])]
    make = mutated(module, *changes).variants[planted.algorithm].make
    found = first_difference(vector.rounds, simulated(vector, make(**vector.options)), TOLERANCE)
    assert found is not None
    assert found.error > 1e-5
