"""FedMoments against a reference in NumPy, and what its estimate of the start is made for."""

import numpy as np
import pytest

import fedda
from fedda.core.losses import cross_entropy
from fedda_reproduction.study.fedmoments import FEDMOMENTS
from helpers.problems import BATCH, CLASSIFIED, W0, drawn, matrix, softmax
from helpers.quadratics import Quadratics, two_kinds_of_clients

pytestmark = pytest.mark.usefixtures("x64")

HYPER = {"client_lr": 0.3, "server_lr": 0.7, "beta1": 0.8, "shrink": 0.6}
RUN = {"seed": 7, "rounds": 8, "cohort": 3}
EPOCHS = {"local_work": 2, "local_unit": "epochs"}
STEPS = {"local_work": 3, "local_unit": "steps"}
TOLERANCE = {"rtol": 1e-12, "atol": 1e-13}  # as for FedOpt: some thousand operations near 1


def start_of_line(gradients):
    """T times the value at t = 0 of the regression line, entry by entry, by NumPy's polyfit."""
    T = len(gradients)
    flat = np.stack([g.ravel() for g in gradients])
    line = np.polyfit(np.arange(T), flat, 1)[1] if T > 1 else flat[0]
    return T * line.reshape(gradients[0].shape)


def reference(draws, client_lr, server_lr, beta1, shrink):
    W, m, kept = W0, 0 * W0, []
    for visits in draws:
        seen = []
        for visit in visits:
            w, gradients = W, []
            for batch in visit.batches:
                gradients.append(batch.gradient(w))
                w = w - client_lr * gradients[-1]
            if visit.examples:
                S = sum(gradients)
                seen.append((visit.examples, S, S - start_of_line(gradients)))
        p = np.array([N for N, _, _ in seen]) / sum(N for N, _, _ in seen)
        S = sum(p_i * S_i for p_i, (_, S_i, _) in zip(p, seen, strict=True))
        E = sum(p_i * E_i for p_i, (_, _, E_i) in zip(p, seen, strict=True))
        s = 0.0
        if len(seen) > 1:
            # The weighted variance between clients, and that of their weighted mean.
            between = sum(
                p_i * ((E_i - E) ** 2).sum() for p_i, (_, _, E_i) in zip(p, seen, strict=True)
            ) / (1 - (p**2).sum())
            s = max(0.0, 1 - shrink * (p**2).sum() * between / (E**2).sum())
        kept.append(s)
        m = beta1 * m + (1 - beta1) * (S - s * E)
        W = W - server_lr * client_lr * m
    return W, m, kept


def run(work, **hyper):
    return fedda.run(
        FEDMOMENTS, softmax, CLASSIFIED, cross_entropy, batch=BATCH, eval_every=100,
        **RUN, **work, **HYPER | hyper,
    )  # fmt: skip


@pytest.mark.parametrize("work", [EPOCHS, STEPS], ids=["epochs", "steps"])
def test_the_numpy_reference(work):
    """Clients with many, one and no examples, and unequal numbers of steps under epochs."""
    state = run(work).state
    W, m, kept = reference(drawn(**RUN, **work), **HYPER)
    np.testing.assert_allclose(matrix(state.params), W, **TOLERANCE)
    np.testing.assert_allclose(matrix(state.momentum), m, **TOLERANCE)
    assert any(0 < s < 1 for s in kept)


def test_all_shrunk_it_is_fedavgm():
    got = run(STEPS, shrink=1e9)
    plain = fedda.run(
        "fedopt-sgdm", softmax, CLASSIFIED, cross_entropy, batch=BATCH, eval_every=100,
        form="paper", client_lr=0.3, server_lr=0.7, beta1=0.8, **RUN, **STEPS,
    )  # fmt: skip
    np.testing.assert_allclose(matrix(got.params), matrix(plain.params), **TOLERANCE)


def end(name, eta, T, **hyper):
    """Where full-batch clients with the Hessians 1 and 4 end; the optimum is 2.2."""
    problem = Quadratics(*two_kinds_of_clients(), start=np.array([1.5, -2.0, 0.5]))
    settings = {"client_lr": eta, "server_lr": 1.0, "beta1": 0.5, "local_work": T} | hyper
    (*_, last) = problem.evaluations(name, 3000, eval_every=3000, **settings)
    return np.asarray(last.run.state.params)


def test_with_two_steps_the_start_is_exact_and_the_end_is_the_optimum():
    np.testing.assert_allclose(end(FEDMOMENTS, 0.1, 2, shrink=0.0), 2.2, atol=1e-9)
    assert np.abs(end("fedopt-sgdm", 0.1, 2, form="paper") - 2.2).min() > 0.01


def test_the_bias_falls_as_the_square_of_the_step():
    """FedAvg's fixed point is off by O(eta). Without the linear drift, O(eta²) remains.

    With x = eta h, a step multiplies a gradient by 1 - x. At T = 4 its regression line starts at
    1 + x² times the first gradient, up to x³: t² over t = 0 .. 3 is 3 t - 1 by least squares, and
    (1 - x)^t = 1 - t x + t (t - 1) / 2 x² + ..., so the start is 1 - x² / 2.
    """
    etas = np.array([0.01, 0.02])
    ours, theirs = (
        [np.abs(end(name, eta, 4, **more) - 2.2).max() for eta in etas]
        for name, more in ((FEDMOMENTS, {"shrink": 0.0}), ("fedopt-sgdm", {"form": "paper"}))
    )
    assert np.log2(theirs[1] / theirs[0]) == pytest.approx(1, abs=0.15)
    assert np.log2(ours[1] / ours[0]) == pytest.approx(2, abs=0.15)
    # sum_i h_i (1 - (eta h_i)² / 2) (w - c_i) = 0 for h = 1, 4 and c = -1, 3, to first order:
    # w - 2.2 = (1 * 3.2 - 64 * 0.8) eta² / 2 / 5.
    assert ours[0] == pytest.approx(abs(3.2 - 64 * 0.8) * etas[0] ** 2 / 2 / 5, rel=0.1)
