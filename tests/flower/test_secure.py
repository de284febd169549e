"""Secure aggregation gives the sum of the uploads, also when clients are lost."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.flatten_util import ravel_pytree

import fedda
from fedda import algorithms, api
from fedda.core.local import Weighted
from fedda.data.federation import from_clients
from fedda.errors import InputError
from fedda.flower import Secure, client_app, secure_mods
from fedda.flower.aggregation import AggregationError
from helpers.secure_federation import (
    CLIENTS,
    COLLECT,
    LIKE,
    SECURE,
    SETUP,
    STAGES,
    TASK,
    UNMASK,
    UPLOADS,
    Federation,
    apply,
    assert_sum,
    examples,
    federation,
    init,
    order,
    plain_sum,
    sender,
)

pytestmark = pytest.mark.usefixtures("x64")


@pytest.mark.parametrize("bits", [8, 16, 29])
def test_the_sum_is_that_of_the_uploads_to_the_quantisation(bits):
    secure = SECURE._replace(bits=bits)
    error = assert_sum(federation().sum(LIKE, secure), range(CLIENTS), secure)
    step = CLIENTS * 2 * secure.most / 2**bits
    assert error.control > step / 100  # it is not just any bound


def test_rounding_has_no_bias():
    found = [federation(2).sum(LIKE, SECURE._replace(bits=4)) for _ in range(40)]
    errors = np.array([one.upload.control - plain_sum(range(2)).control for one in found])
    step = 2 * SECURE.most / 2**4
    deviation = np.sqrt(2 / 4) * step / np.sqrt(errors.size)  # a rounding varies by 1/4 at most
    assert abs(errors.mean()) < 5 * deviation
    assert np.abs(errors).max() > step / 10


@pytest.mark.parametrize("name", algorithms.names())
def test_every_algorithm_has_its_uploads_summed(name):
    algorithm = algorithms.get(name)
    model = fedda.Model(init, apply)
    hp = api.traced(algorithm.Hyper(), model)
    shard = from_clients([examples(0)]).shard(0)

    def uploads(key):
        params = model.init(key)
        state, memory = algorithm.init(hp, params), algorithm.memory(hp, params)
        return [
            phase.work(hp, TASK, phase.send(hp, state), memory, shard, key)[0]
            for phase in algorithm.phases
        ]

    rng = np.random.default_rng(1)
    for like in jax.eval_shape(uploads, random.key(0)):
        own = [
            jax.tree.map(lambda leaf: rng.uniform(-4, 4, leaf.shape).astype(leaf.dtype), like)
            for _ in range(2)
        ]
        clients = Federation([sender(client, one) for client, one in enumerate(own)])
        found = clients.sum(like)
        assert found.counted == {0, 1}, clients.refused
        error = jax.tree.map(lambda a, b, c: np.abs(a - b - c).max(), found.upload, *own)
        # Two clients, each off by less than a step. The widest range is that of a counter: 6 steps
        # are two epochs of 8 examples in batches of 3, and 8 is the largest weight.
        assert max(jax.tree.leaves(error)) < 2 * (2 * 6 * 8) / 2**22
        same_form = jax.tree.map(lambda a, b: a.dtype == b.dtype, found.upload, like)
        assert all(jax.tree.leaves(same_form))


def test_half_precision_is_summed_too():
    rows = [np.asarray(one.control, jnp.bfloat16) for one in UPLOADS[:3]]
    found = Federation([sender(client, row) for client, row in enumerate(rows)]).sum(
        jax.ShapeDtypeStruct(rows[0].shape, jnp.bfloat16)
    )
    exact = sum(row.astype(float) for row in rows)
    assert found.upload.dtype == jnp.result_type(float), "a sum is not rounded to bfloat16"
    np.testing.assert_allclose(found.upload, exact, rtol=0, atol=3 * 8 / 2**22)


def test_an_entry_outside_of_its_range_is_clipped_and_told():
    wild = UPLOADS[1]._replace(control=UPLOADS[1].control + 100)
    clients = Federation([sender(0, UPLOADS[0]), sender(1, wild), sender(2, UPLOADS[2])])
    found = clients.sum(LIKE)
    assert found.clipped == 1
    wanted = UPLOADS[0].control + SECURE.most + UPLOADS[2].control
    np.testing.assert_allclose(found.upload.control, wanted, atol=3 * 8 / 2**22)


@pytest.mark.parametrize("second", [None, *STAGES])
@pytest.mark.parametrize("first", STAGES)
def test_clients_may_be_lost_at_every_stage(first, second):
    lost = {(0, first)} | ({(3, second)} if second else set())
    clients = federation(lost=lost)
    early = {client for client, stage in lost if stage != UNMASK}
    assert_sum(clients.sum(LIKE), [client for client in range(CLIENTS) if client not in early])


@pytest.mark.parametrize("stage", STAGES)
def test_clients_may_be_lost_where_each_shares_with_few(stage):
    secure = SECURE._replace(neighbours=5)
    found = federation(7, lost=[(2, stage)]).sum(LIKE, secure)
    assert_sum(found, [0, 1, *([2] if stage == UNMASK else []), 3, 4, 5, 6], secure)


@pytest.mark.parametrize("stage", STAGES)
def test_there_is_no_sum_over_too_few(stage):
    assert SECURE.needed(CLIENTS) == 3
    clients = federation(lost=[(client, stage) for client in range(3)])
    with pytest.raises(AggregationError, match="too few clients are left"):
        clients.sum(LIKE)


def test_clients_begin_anew_after_a_sum_that_failed():
    clients = federation(lost=[(client, COLLECT) for client in range(3)])
    with pytest.raises(AggregationError):
        clients.sum(LIKE)
    clients.lost = set()
    assert_sum(clients.sum(LIKE), range(CLIENTS))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"most": 0.0}, "most of secure must be a positive number, got 0.0"),
        ({"most_weight": math.inf}, "most_weight of secure must be a positive number, got inf"),
        ({"most_loss": -1.0}, "most_loss of secure must be a positive number"),
        ({"bits": 30}, "1 to 29 for 5 clients, got 30"),
        ({"bits": 0}, "1 to 29"),
        ({"threshold": 0.5}, "above 0.5 and below 1, got 0.5"),
        ({"threshold": 1.0}, "above 0.5 and below 1"),
        ({"neighbours": 4}, "an odd number from 3 on, got 4"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, words):
    with pytest.raises(InputError, match=words):
        federation().sum(LIKE, SECURE._replace(**changes))


def test_one_client_alone_is_never_asked():
    with pytest.raises(InputError, match="Ask two clients or more"):
        federation(1).sum(LIKE)


def test_fedda_with_lost_clients_stays_as_close_as_the_quantisation_allows():
    """The reference knows nothing of Flower: it adds up what the clients that counted compute.

    On a quadratic loss a round is affine in the state (W, M), and the merge in the sum of uploads.
    So if no entry of the state is off by more than e, and no entry of the sum by more than d, then
    after the round none is off by more than |J| e + |B| d, with their Jacobians J and B. The
    weights are whole numbers, and summed without error.
    """
    secure = Secure(most=20.0, most_weight=8, bits=20)
    lost = [set(), {(2, COLLECT)}, {(0, SETUP), (4, COLLECT)}, {(1, UNMASK)}]
    algorithm = algorithms.get("fedda-sgdm")
    hyper = {"client_lr": 0.05, "server_lr": 1.0, "beta1": 0.9, "mu": 0.0}
    hp = api.traced(algorithm.Hyper(**hyper), TASK.model)
    (phase,) = algorithm.phases
    shards = from_clients([examples(client) for client in range(CLIENTS)])
    start = algorithm.init(hp, TASK.model.init(random.key(3)))
    state, (reference, unflat) = start, ravel_pytree(start)

    def total_of(flat, counts, key):
        def work(client, counted):
            own = random.fold_in(key, client), shards.shard(client)
            upload = phase.work(hp, TASK, phase.send(hp, unflat(flat)), (), *own[::-1])[0]
            return jax.tree.map(lambda leaf: counted * leaf, upload)

        uploads = jax.vmap(work)(jnp.arange(CLIENTS), counts)
        return jax.tree.map(lambda leaf: leaf.sum(0), uploads)

    def merged(sums, flat, total):
        total = Weighted(ravel_pytree(total.sum)[1](sums), total.weight)
        return ravel_pytree(phase.merge(hp, unflat(flat), total))[0]

    @jax.jit
    def after(flat, counts, key):
        total = total_of(flat, counts, key)
        return merged(ravel_pytree(total.sum)[0], flat, total)

    @jax.jit
    def jacobians(flat, counts, key):
        total = total_of(flat, counts, key)
        of_sums = jax.jacfwd(merged)(ravel_pytree(total.sum)[0], flat, total)
        return jax.jacfwd(after)(flat, counts, key), of_sums

    like = jax.eval_shape(total_of, reference, jnp.ones(CLIENTS), random.key(0))
    clients = Federation(
        [
            client_app(TASK, lambda context, own=client: examples(own), mods=secure_mods())
            for client in range(CLIENTS)
        ]
    )
    bound = np.zeros(reference.shape)
    for number, gone in enumerate(lost):
        clients.lost = gone
        message = phase.send(hp, state)
        found = clients.sum(like, secure, message=message, round=number, hyper=hyper)
        counted = set(range(CLIENTS)) - {client for client, stage in gone if stage != UNMASK}
        assert (found.counted, found.clipped) == (counted, 0), clients.refused

        counts = jnp.asarray([float(client in counted) for client in range(CLIENTS)])
        key = order(0, round=number).key()
        J, B = jacobians(reference, counts, key)
        step = len(counted) * 2 * secure.most * secure.most_weight / 2**secure.bits
        bound = np.abs(J) @ bound + np.abs(B).sum(1) * step

        state = phase.merge(hp, state, jax.tree.map(jnp.asarray, found.upload))
        reference = after(reference, counts, key)
        error = np.abs(ravel_pytree(state)[0] - reference)
        assert (error <= bound + 1e-12).all()
        assert error.max() > 1e-3 * bound.max()
    assert bound.max() < 0.01 * np.abs(reference - ravel_pytree(start)[0]).max()
