"""Our algorithms against FedJAX and Flower: the same data, batches and start, in float64.

FedJAX trains its own clients on the batches that ours were given; Flower runs its whole `start`,
with clients in NumPy and no network. Where a peer differs from us, a test says in which line, and
that the numbers are equal once this line is changed. What "the paper" says is what our modules say
of it: these tests judge our arithmetic, not our reading. `make test-peers` runs this file.
"""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fedjax import ClientDataset, PaddedBatchHParams, ShuffleRepeatBatchHParams, optimizers
from fedjax.algorithms import fed_avg, mime, mime_lite
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvgM, FedYogi
from flwr.supercore.task_identity import TaskIdentity

import fedda
from conformance.problem import mean_gradient
from fedda.core.losses import cross_entropy
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients
from fedda.simulate.cohort import draw_cohort
from helpers.batches import most_of, read
from helpers.problems import BATCH, CLASSIFIED, SIZES, W0, matrix, softmax

pytestmark = pytest.mark.usefixtures("x64")

SEED, ROUNDS, COHORT, EPOCHS = 7, 8, 3, 2
ETA, ALPHA, BETA, BETA1, BETA2, TAU = 0.3, 0.2, 0.8, 0.8, 0.95, 0.05
# Numbers of about 1 after some thousand operations, each of which errs by 1.1e-16 of its result;
# a division by TAU makes an error at most 20 times as large.
close = partial(np.testing.assert_allclose, rtol=1e-12, atol=1e-13)


def assert_differ(one, other):
    """By much more than rounding does."""
    assert np.abs(one - other).max() > 1e-3


@lru_cache
def drawn(phase=0):
    """For every round, by client of its cohort: its batches, as lists of row numbers."""
    plan, shards = Plan(BATCH, EPOCHS, "epochs"), from_clients(CLASSIFIED)

    @jax.jit
    def batches(r, i):
        key = jax.random.key(SEED)
        for number in (1, r, phase, i):  # 1 is training (0: initial parameters)
            key = jax.random.fold_in(key, number)
        shard = shards.shard(i)
        return read(Task(softmax, cross_entropy, plan).batches(shard, key), most_of(plan, shard))

    def rows_of(r, i):
        steps, rows, mask = jax.device_get(batches(r, i))
        return [rows[t, 0][mask[t, 0]] for t in range(steps if SIZES[i] else 0)]

    cohorts = [draw_cohort(SEED, r, len(SIZES), COHORT).tolist() for r in range(ROUNDS)]
    return [{i: rows_of(r, i) for i in cohort} for r, cohort in enumerate(cohorts)]


def ours(name, **chosen):
    result = fedda.run(
        name, softmax, CLASSIFIED, cross_entropy, seed=SEED, rounds=ROUNDS, eval_every=ROUNDS,
        cohort=COHORT, batch=BATCH, local_work=EPOCHS, local_unit="epochs", **chosen,
    )  # fmt: skip
    return matrix(result.params)


def test_the_draws_hold_what_the_comparisons_are_for():
    """Clients with many, one and no examples, and batches of every size."""
    for phase in (0, 1):
        visits = [visit for cohort in drawn(phase) for visit in cohort.items()]
        assert {0, 1, max(SIZES)} <= {SIZES[i] for i, _ in visits}
        assert {len(rows) for _, batches in visits for rows in batches} == {2, 4}


# ---- FedJAX


class Replayed(ClientDataset):
    """A client of FedJAX that is given our batches; the rest is FedJAX's."""

    def __init__(self, i, batches):
        x, y = CLASSIFIED[i]
        super().__init__({"x": x, "y": y})
        self.batches = [{"x": x[rows], "y": y[rows]} for rows in batches]

    def shuffle_repeat_batch(self, hparams=None, **kwargs):
        return self.batches


def per_example_loss(params, batch, rng):
    scores = jax.nn.log_softmax(batch["x"] @ params["w"] + params["b"])
    return -jnp.take_along_axis(scores, batch["y"][:, None], 1)[:, 0]


def gradient(params, batch, rng):
    return jax.grad(lambda params: per_example_loss(params, batch, rng).mean())(params)


def fedjax_run(algorithm, phase=0):
    state = algorithm.init({"w": jnp.asarray(W0[:-1]), "b": jnp.asarray(W0[-1])})
    for cohort in drawn(phase):
        clients = [(i, Replayed(i, rows), jax.random.PRNGKey(0)) for i, rows in cohort.items()]
        state, _ = algorithm.apply(state, clients)
    return matrix(jax.tree.map(np.asarray, state.params))


def fedjax_mime(name, optimizer):
    build = mime.mime if name.startswith("mime-") else mime_lite.mime_lite
    batches = ShuffleRepeatBatchHParams(BATCH), PaddedBatchHParams(BATCH)
    algorithm = build(per_example_loss, optimizer, *batches, server_learning_rate=ALPHA)
    # Our Mime takes its local steps in the second exchange, with keys of its own.
    return fedjax_run(algorithm, phase=1 if name.startswith("mime-") else 0)


@pytest.fixture
def as_fedjax_needs(monkeypatch):
    """FedJAX 0.0.17 calls jax.tree_map, of which JAX kept only the name jax.tree.map."""
    monkeypatch.setattr(jax, "tree_map", jax.tree.map, raising=False)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


fedjax_test = pytest.mark.usefixtures("as_fedjax_needs")
both_mimes = pytest.mark.parametrize("method", ["mime", "mimelite"])


@fedjax_test
@pytest.mark.parametrize(
    ("name", "chosen", "momentum"),
    [("fedavg", {}, None), ("fedopt-sgdm", {"beta1": BETA1}, BETA1)],
)
def test_fedjax_fed_avg(name, chosen, momentum):
    client, server = optimizers.sgd(ETA), optimizers.sgd(ALPHA, momentum)
    batches = ShuffleRepeatBatchHParams(BATCH)
    algorithm = fed_avg.federated_averaging(gradient, client, server, batches)
    close(ours(name, client_lr=ETA, server_lr=ALPHA, **chosen), fedjax_run(algorithm))


@fedjax_test
@both_mimes
def test_fedjax_mime_sgdm(method):
    """The paper's momentum is damped, m <- beta m + (1 - beta) d; that of FedJAX, Optax's, is not.

    So its m is 1 / (1 - beta) times ours, and its rate must be 1 - beta times ours.
    """
    name = f"{method}-sgdm"
    mine = ours(name, client_lr=ETA, server_lr=ALPHA, beta=BETA)
    close(mine, fedjax_mime(name, optimizers.sgd(ETA * (1 - BETA), BETA)))
    assert_differ(mine, fedjax_mime(name, optimizers.sgd(ETA, BETA)))


@fedjax_test
@both_mimes
def test_fedjax_mime_adam(method):
    """FedJAX computes the direction with v after d, and corrects the bias: our `fresh`.

    In the paper v is frozen during local steps, like m; this is our `frozen`.
    """
    name = f"{method}-adam"
    hp = {"client_lr": ETA, "server_lr": ALPHA, "beta1": BETA1, "beta2": BETA2, "eps": TAU}
    theirs = fedjax_mime(name, optimizers.adam(ETA, BETA1, BETA2, TAU))
    close(ours(name, denominator="fresh", **hp), theirs)
    assert_differ(ours(name, denominator="frozen", **hp), theirs)


@fedjax_test
@both_mimes
def test_fedjax_mime_adagrad(method):
    """The paper divides by sqrt(v) + eps; FedJAX's AdaGrad, Optax's, by sqrt(v + eps)."""

    def adagrad(divisor):
        def apply(d, v, params):
            v = jax.tree.map(lambda d, v: v + d**2, d, v)
            return v, jax.tree.map(lambda p, d, v: p - ETA * d / divisor(v), params, d, v)

        return optimizers.Optimizer(partial(jax.tree.map, jnp.zeros_like), jax.jit(apply))

    name = f"{method}-adagrad"
    mine = ours(name, client_lr=ETA, server_lr=ALPHA, eps=TAU, denominator="fresh")
    theirs = fedjax_mime(name, optimizers.adagrad(ETA, initial_accumulator_value=0, eps=TAU))
    close(mine, fedjax_mime(name, adagrad(lambda v: jnp.sqrt(v) + TAU)))
    close(theirs, fedjax_mime(name, adagrad(lambda v: jnp.sqrt(v + TAU))))
    assert_differ(mine, theirs)


# ---- Flower


class Nodes:
    """What Flower's `start` needs of a grid: node i + 1 is client i, while it is in the cohort."""

    def __init__(self):
        self.round = 0

    def get_node_ids(self):
        return [i + 1 for i in drawn()[self.round]]

    def send_and_receive(self, messages, timeout):
        replies = [self.reply(message) for message in messages]
        self.round += len(replies) > 0  # there are no messages where nothing is evaluated
        return replies

    def reply(self, message):
        i = message.metadata.dst_node_id - 1
        (W,) = message.content["arrays"].to_numpy_ndarrays()
        metrics = MetricRecord({"num-examples": SIZES[i]})
        arrays = ArrayRecord([trained(W, i, drawn()[self.round][i])])
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)


def trained(W, i, batches):
    """Where a client's SGD ends."""
    x, y = CLASSIFIED[i]
    for rows in batches:
        W = W - ETA * mean_gradient(W, x[rows], y[rows])
    return W


def flower_run(strategy, **hyper):
    # Messages carry the numbers of a task, a run and a node, which no server gave out here.
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    strategy = strategy(**hyper, fraction_evaluate=0.0)
    result = strategy.start(Nodes(), ArrayRecord([W0]), num_rounds=ROUNDS)
    (W,) = result.arrays.to_numpy_ndarrays()
    return W


BETAS = {"beta1": BETA1, "beta2": BETA2, "tau": TAU}
MOMENTS = {"eta": ALPHA, "beta_1": BETA1, "beta_2": BETA2, "tau": TAU}
SERVERS = {  # our hyper-parameters, and Flower's strategy with the same
    "sgdm": (
        {"beta1": BETA1},
        partial(flower_run, FedAvgM, server_learning_rate=ALPHA, server_momentum=BETA1),
    ),
    "adagrad": ({"tau": TAU}, partial(flower_run, FedAdagrad, eta=ALPHA, tau=TAU)),
    "adam": (BETAS, partial(flower_run, FedAdam, **MOMENTS)),
    "yogi": (BETAS, partial(flower_run, FedYogi, **MOMENTS)),
}


def both(server, form, server_lr=ALPHA):
    hyper, flower = SERVERS[server]
    mine = ours(f"fedopt-{server}", form=form, client_lr=ETA, server_lr=server_lr, **hyper)
    return mine, flower()


def written_out(server, start, counted):
    """FedOpt in NumPy. v begins at `start`; `counted` updates before and in the first round make
    the bias correction of Kingma and Ba, None makes none.
    """
    W, m, v = W0, 0, start
    beta1 = 0 if server == "adagrad" else BETA1
    for r, cohort in enumerate(drawn()):
        total = sum(SIZES[i] for i in cohort)
        D = sum(SIZES[i] / total * (trained(W, i, rows) - W) for i, rows in cohort.items())
        m = beta1 * m + (1 - beta1) * D
        v = {
            "adagrad": v + D**2,
            "adam": BETA2 * v + (1 - BETA2) * D**2,
            "yogi": v - (1 - BETA2) * D**2 * np.sign(v - D**2),
        }[server]
        rate = ALPHA
        if counted is not None:
            rate *= np.sqrt(1 - BETA2 ** (r + counted)) / (1 - BETA1 ** (r + counted))
        W = W + rate * m / (np.sqrt(v) + TAU)
    return W


@pytest.mark.parametrize("server", ["sgdm", "adagrad", "adam"])
def test_flower_is_our_keras_form(server):
    close(*both(server, "keras"))


def test_flower_fedavgm_is_also_our_paper_form_with_another_rate():
    """Momentum that is damped by 1 - beta1 needs a rate that is as much larger."""
    close(*both("sgdm", "paper", server_lr=ALPHA / (1 - BETA1)))


PAPER = {"start": TAU**2, "counted": None}  # Reddi et al.: v_{-1} >= tau², and no correction
KERAS = {"start": 0.0, "counted": 2}


@pytest.mark.parametrize(
    ("server", "form", "mine", "theirs"),
    [
        # v begins at 0, below what the paper asks for.
        ("adagrad", "paper", PAPER, PAPER | {"start": 0.0}),
        ("yogi", "paper", PAPER, PAPER | {"start": 0.0}),
        # FedYogi has no bias correction, unlike Flower's own FedAdam and the paper authors' code.
        ("yogi", "keras", KERAS, KERAS | {"counted": None}),
        # FedAdam differs from the paper in both lines; each of them matters (next test).
        ("adam", "paper", PAPER, KERAS),
    ],
)
def test_flower_differs_from_us_in_these_lines(server, form, mine, theirs):
    us, flower = both(server, form)
    close(us, written_out(server, **mine))
    close(flower, written_out(server, **theirs))
    assert_differ(us, flower)


@pytest.mark.parametrize("change", [{"counted": 1}, {"counted": None}, {"start": TAU**2}])
def test_flower_fedadam_counts_one_update_too_many(change):
    """Kingma and Ba correct the first step by 1 - beta; Flower (round 1, plus 1) by 1 - beta².

    So does our keras form. With any of these three lines changed, its numbers are not Flower's.
    """
    _, flower = SERVERS["adam"]
    assert_differ(written_out("adam", **KERAS | change), flower())
