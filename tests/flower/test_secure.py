"""Secure aggregation gives the sum of the uploads, and shows none of them.

Flower's own mod and workflow run here, in one process; what they send is serialised on its way.
"""

import io
import math
import pickle
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flwr.app import (
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.supercore.task_identity import TaskIdentity
from jax import random
from jax.flatten_util import ravel_pytree
from scipy import stats

import fedda
from fedda import algorithms, api
from fedda.core.local import Weighted
from fedda.core.losses import squared_error
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients
from fedda.errors import InputError
from fedda.flower import Secure, client_app, secure_mods
from fedda.flower import messages as wire
from fedda.flower.aggregation import Halted
from fedda.flower.unmasking import secure_sum

pytestmark = pytest.mark.usefixtures("x64", "server_process")

SETUP, SHARE, COLLECT, UNMASK = "setup", "share_keys", "collect_masked_vectors", "unmask"
STAGES = (SETUP, SHARE, COLLECT, UNMASK)
CONFIGS = "secaggplus_configs"
NODES = (2**63 + 5, 7, 2**62, 99, 12, 2**64 - 2, 1)  # node ids have 64 bits, none of them a sign
COUNTS = (5, 3, 4, 2, 6, 1, 4)
CLIENTS = 5
SECURE = Secure(most=4.0, most_weight=8)
PLAN = Plan(3, 2, "epochs")


@pytest.fixture
def server_process(monkeypatch):
    """Flower lets no process make messages that is not a server's or a client's."""
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


# ---------------------------------------------------------------------------- the federation


class Federation:
    """Clients in this process. `lost` are those whose reply of a stage does not arrive."""

    def __init__(self, apps, lost=(), spoil=None):
        self.apps, self.lost, self.spoil = apps, set(lost), spoil
        self.contexts = [
            Context(1, node, {"partition-id": client}, RecordDict(), {})
            for client, node in zip(range(len(apps)), NODES, strict=False)
        ]
        self.arrived = {stage: {} for stage in STAGES}
        self.refused = {}

    def ask(self, messages):
        for client, message in messages.items():
            stage = message.content[CONFIGS]["stage"]
            message.metadata.__dict__["_message_id"] = f"{client} {stage}"
            try:
                reply = self.apps[client](over_the_wire(message), self.contexts[client])
            except Exception as error:
                reply = Message(Error(2, str(error)), reply_to=message)
            if (client, stage) in self.lost:
                continue
            reply = over_the_wire(reply)
            if self.spoil is not None and reply.has_content():
                self.spoil(client, stage, reply.content)
            self.arrived[stage][client] = over_the_wire(reply)
            yield client, reply

    def refuse(self, client, reason):
        self.refused[client] = str(reason)

    def sum(self, like, secure=SECURE, plan=PLAN, orders=None):
        orders = orders or {client: order(client) for client in range(len(self.apps))}
        return secure_sum(secure, orders, like, plan, self.ask, self.refuse)


def over_the_wire(message):
    return message_from_proto(message_to_proto(message))


def order(client, content=None, **changes):
    """A message that asks a client for its upload."""
    asked = wire.Order(
        algorithm="fedda-sgdm",
        options="{}",
        seed=0,
        round=0,
        phase=0,
        full=False,
        clients=CLIENTS,
        serial=client + 1,
        counted=0,
        settled=0,
    )._replace(**changes)
    records = RecordDict({**asked.records(), **(content or {})})
    return Message(records, NODES[client], "train", ttl=60, group_id="0")


def sender(client, upload, loss=1.5, examples=2.0):
    """A client that uploads this whenever it is asked."""
    app = ClientApp(mods=secure_mods())

    @app.train()
    def train(message, context):
        seen = {"loss": loss, "examples": examples}
        content = {
            "fedda": wire.Order.read(message.content).reply(client),
            "upload": wire.pack(upload),
            "seen": MetricRecord(seen),
        }
        return Message(RecordDict(content), reply_to=message)

    return app


class Upload(NamedTuple):
    """Of all kinds: entries that were multiplied by a weight, the weight, and others."""

    moved: Weighted
    control: np.ndarray


def upload(client, size=7):
    rng = np.random.default_rng(client)
    model = {"kernel": rng.uniform(-4, 4, (size, 3)), "bias": rng.uniform(-4, 4, 2)}
    weight = float(COUNTS[client])
    scaled = jax.tree.map(lambda leaf: weight * leaf, model)
    return Upload(Weighted(scaled, np.float64(weight)), rng.uniform(-4, 4, size))


def form_of(upload):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), upload)


UPLOADS = [upload(client) for client in range(len(NODES))]
LIKE = form_of(UPLOADS[0])


def federation(clients=CLIENTS, **faults):
    return Federation([sender(client, UPLOADS[client]) for client in range(clients)], **faults)


def plain_sum(clients):
    return jax.tree.map(lambda *leaves: sum(leaves), *(UPLOADS[client] for client in clients))


def assert_sum(found, clients, secure=SECURE):
    """Whatever the docstring of `Secure` promises, of the sum over just these clients."""
    assert found.counted == set(clients)
    step = len(clients) * 2 * secure.most / 2**secure.bits
    error = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), found.upload, plain_sum(clients))
    assert max(jax.tree.leaves(error.moved.sum)) < secure.most_weight * step
    assert error.moved.weight == 0
    assert error.control < step
    visited = 2 * secure.most_weight  # two epochs
    seen = (found.seen.loss, found.seen.examples)
    for one, wanted, most in zip(seen, (1.5, 2.0), (secure.most_loss, 1), strict=True):
        bound = len(clients) * 2 * most * visited / 2**secure.bits
        assert abs(one - len(clients) * wanted) < bound
    assert found.clipped == 0
    return error


# ------------------------------------------------------------------------------------ sums


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
        assert max(jax.tree.leaves(error)) < 2 * 2 * 4 * 8 / 2**22
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


# -------------------------------------------------------------------------------- the lost


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
    with pytest.raises(Halted, match="too few clients are left"):
        clients.sum(LIKE)


def test_clients_begin_anew_after_a_sum_that_failed():
    clients = federation(lost=[(client, COLLECT) for client in range(3)])
    with pytest.raises(Halted):
        clients.sum(LIKE)
    clients.lost = set()
    assert_sum(clients.sum(LIKE), range(CLIENTS))


# -------------------------------------------------------------------------- what is revealed


def masked(clients):
    """What arrived of each client's vector, without the workflow's own weight."""
    return {
        client: np.load(io.BytesIO(reply.content[CONFIGS]["masked_params"][1]))
        for client, reply in clients.arrived[COLLECT].items()
    }


def looks_random(vector):
    return stats.chisquare(np.bincount(vector >> 28, minlength=16)).pvalue > 1e-6


def wide_federation(**faults):
    return Federation([sender(client, upload(client, 1500)) for client in range(3)], **faults)


WIDE = form_of(upload(0, 1500))


def in_plain(own, secure=SECURE):
    """The whole numbers that the mod makes of an upload, in the order of the names."""
    weighted = own.moved.sum
    moved = np.concatenate([weighted["bias"].ravel(), weighted["kernel"].ravel()]) / 8
    parts = np.concatenate([own.control, moved]) / secure.most
    return np.rint((parts + 1) * 2 ** (secure.bits - 1)).astype(np.int64)


def test_what_arrives_of_a_client_looks_random_and_is_new_each_time():
    first, second = wide_federation(), wide_federation()
    first.sum(WIDE)
    second.sum(WIDE)
    for client, vector in masked(first).items():
        own = in_plain(upload(client, 1500))
        assert looks_random(vector)
        assert not looks_random(own)
        # What was seen comes before the upload's entries, its weight and two flags after them.
        assert len(vector) == 2 + len(own) + 3
        assert abs(np.corrcoef(vector[2:-3], own)[0, 1]) < 5 / np.sqrt(len(own))
        assert (vector != masked(second)[client]).mean() > 0.999


def test_it_still_does_after_the_server_has_learnt_the_private_masks():
    clients = wide_federation()
    clients.sum(WIDE)
    shares = {}
    for reply in clients.arrived[UNMASK].values():
        said = reply.content[CONFIGS]
        for node, share in zip(said["nids"], said["shares"], strict=True):
            shares.setdefault(node, []).append(share)
    for client, vector in masked(clients).items():
        seed = combine_shares(shares[NODES[client]])
        _, private = pseudo_rand_gen(seed, 2**32, [(1,), vector.shape])
        assert looks_random((vector - private) % 2**32)


def test_the_masks_of_those_who_count_are_not_removed_by_adding_up():
    clients = wide_federation(lost=[(2, COLLECT)])
    found = clients.sum(WIDE)
    added = sum(masked(clients).values()) % 2**32
    assert looks_random(added)
    total = upload(0, 1500).control + upload(1, 1500).control
    np.testing.assert_allclose(found.upload.control, total, atol=2 * 8 / 2**22)


def test_nothing_else_of_a_reply_tells_of_the_upload():
    clients = federation()
    clients.sum(LIKE)
    for reply in clients.arrived[COLLECT].values():
        assert all(len(record) == 0 for record in reply.content.array_records.values())
        numbers = [dict(record) for record in reply.content.metric_records.values()]
        assert numbers == [{"num_examples": 1}]
        configs = dict(reply.content.config_records)
        assert set(configs.pop("fedda")) == {"algorithm", "serial", "partition"}
        assert set(configs.pop(CONFIGS)) == {"masked_params"}
        assert {key: dict(value) for key, value in configs.items()} == {
            "fitres.metrics": {},
            "fitres.status": {"code": 0, "message": ""},
        }


# ------------------------------------------------------------------------------ who is refused


def without_record(content):
    del content[CONFIGS]


def setting(name, change):
    def spoil(content):
        content[CONFIGS][name] = change(content[CONFIGS][name])

    return spoil


def saved(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


def zipped(array):
    file = io.BytesIO()
    np.savez(file, array[:0])
    return file.getvalue()


def vector(make):
    return setting("masked_params", lambda parts: [parts[0], make(np.load(io.BytesIO(parts[1])))])


def another_order(content):
    content["fedda"] = ConfigRecord({**content["fedda"], "serial": 77})


SPOILT = {
    "no keys": (SETUP, without_record, "does not give pk1"),
    "no key at all": (SETUP, setting("pk1", lambda _: b"none"), "cannot be used"),
    "a key of another type": (SETUP, setting("pk2", lambda _: 3), "does not give pk1"),
    "shares for others": (SHARE, setting("dsts", lambda to: [*to[:-1], 5]), "not for those"),
    "shares missing": (SHARE, setting("ctxts", lambda texts: texts[1:]), "does not give dsts"),
    "a long share": (SHARE, setting("ctxts", lambda texts: [bytes(9999), *texts[1:]]), "too long"),
    "numbers for shares": (SHARE, setting("ctxts", lambda texts: [1] * len(texts)), "wrong type"),
    "no vector": (COLLECT, without_record, "no masked vector"),
    "a short vector": (COLLECT, vector(lambda own: saved(own[1:])), "in truth int64"),
    "one entry for all": (COLLECT, vector(lambda own: saved(own[:1])), "in truth int64"),
    "a vector of floats": (COLLECT, vector(lambda own: saved(own.astype(float))), "truth float64"),
    "a long vector": (COLLECT, vector(lambda own: saved(np.tile(own, 99))), "too many bytes"),
    "no array": (COLLECT, vector(lambda own: b"none"), "cannot be read"),
    "a pickle": (COLLECT, vector(lambda own: pickle.dumps(1)), "cannot be read"),
    "an archive": (COLLECT, vector(zipped), "in truth no array"),
    "a pickle inside": (COLLECT, vector(lambda own: saved(np.array([{}]))), "cannot be read"),
    "another order": (COLLECT, another_order, "another order"),
    "no shares": (UNMASK, without_record, "does not give nids"),
    "shares of others": (UNMASK, setting("nids", lambda of: of[::-1]), "not of those"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_who_sends_what_is_not_sound_is_lost_and_the_rest_are_summed(case):
    stage, change, reason = SPOILT[case]

    def spoil(client, at, content):
        if (client, at) == (1, stage):
            change(content)

    clients = federation(spoil=spoil)
    found = clients.sum(LIKE)
    assert_sum(found, range(CLIENTS) if stage == UNMASK else [0, 2, 3, 4])
    assert set(clients.refused) == {1}
    assert reason in clients.refused[1]


def test_a_public_key_that_another_client_has_is_refused():
    others = {}

    def spoil(client, stage, content):
        if stage == SETUP:
            own = content[CONFIGS]
            own["pk2"] = others.setdefault("the first one's", own["pk2"])

    clients = federation(spoil=spoil)
    with pytest.raises(Halted, match="too few"):
        clients.sum(LIKE)
    assert len(clients.refused) == CLIENTS - 1
    assert all("not its own" in reason for reason in clients.refused.values())


@pytest.mark.parametrize("byte", [4, -1])  # of the secret, or of what fills it up
def test_a_wrong_share_is_noticed(byte):
    def spoil(client, stage, content):
        if (client, stage) == (1, UNMASK):
            share = bytearray(content[CONFIGS]["shares"][0])
            share[byte] ^= 1
            content[CONFIGS]["shares"] = [bytes(share), *content[CONFIGS]["shares"][1:]]

    with pytest.raises(Halted, match="wrong share" if byte == 4 else "do not fit together"):
        federation(spoil=spoil).sum(LIKE)


@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_a_client_does_not_upload_what_is_not_finite(number):
    broken = UPLOADS[1]._replace(control=np.full_like(UPLOADS[1].control, number))
    clients = Federation(
        [sender(client, broken if client == 1 else UPLOADS[client]) for client in range(CLIENTS)]
    )
    assert_sum(clients.sum(LIKE), [0, 2, 3, 4])
    assert "not finite" in clients.refused[1]


def test_a_client_refuses_an_upload_of_another_form():
    other = Upload(UPLOADS[1].moved, {"new": UPLOADS[1].control})
    clients = Federation(
        [sender(client, other if client == 1 else UPLOADS[client]) for client in range(CLIENTS)]
    )
    assert_sum(clients.sum(LIKE), [0, 2, 3, 4])
    assert "upload/control" in clients.refused[1]


@pytest.mark.parametrize("kind", ["train", "train.default"])
def test_a_client_gives_no_upload_in_plain(kind):
    app, context = sender(0, UPLOADS[0]), Context(1, NODES[0], {}, RecordDict(), {})
    with pytest.raises(wire.Refused, match="in plain"):
        app(Message(order(0).content, NODES[0], kind), context)


def test_a_client_answers_a_query_and_does_not_tell_how_many_examples_it_has():
    app = client_app(TASK, lambda context: examples(0), mods=secure_mods())
    context = Context(1, NODES[0], {"partition-id": 0}, RecordDict(), {})
    reply = app(Message(RecordDict(), NODES[0], "query"), context)
    assert reply.content["fedda"] == {"partition": 0, "has_examples": True}


@pytest.mark.parametrize(("shares", "needed"), [(1, 1), (4, 2), (5, 1)])
def test_a_client_refuses_a_threshold_that_half_of_the_others_reach(shares, needed):
    setup = {"stage": SETUP, "sample_num": 5, "share_num": shares, "threshold": needed}
    setup |= {"clipping_range": 1.0, "target_range": 2**22, "mod_range": 2**32, "max_weight": 1.0}
    message = order(0, {CONFIGS: ConfigRecord(setup)})
    with pytest.raises(wire.Refused, match=f"{needed} of {shares} shares"):
        sender(0, UPLOADS[0])(message, Context(1, NODES[0], {}, RecordDict(), {}))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"most": 0.0}, "most of secure must be a positive number, got 0.0"),
        ({"most_weight": math.inf}, "most_weight of secure must be a positive number, got inf"),
        ({"most_loss": -1.0}, "most_loss of secure must be a positive number"),
        ({"bits": 30}, "1 to 29, lest a sum over 5 clients overflow; got 30"),
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
    with pytest.raises(InputError, match="Ask two or more"):
        federation(1).sum(LIKE)


# ----------------------------------------------------------------------------------- FedDA


def init(key):
    return {"kernel": random.normal(key, (3, 2)), "bias": jnp.zeros(2)}


def apply(params, x):
    return x @ params["kernel"] + params["bias"][None]


TASK = Task(fedda.Model(init, apply), squared_error, PLAN)


def examples(client):
    rng = np.random.default_rng(client)
    x = rng.normal(size=(COUNTS[client], 3))
    return x, x @ rng.normal(size=(3, 2)) + 0.1 * rng.normal(size=(COUNTS[client], 2))


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
        message = {"message": wire.pack(phase.send(hp, state))}
        orders = {
            client: order(client, message, round=number, hyper=hyper) for client in range(CLIENTS)
        }
        found = clients.sum(like, secure, orders=orders)
        counted = set(range(CLIENTS)) - {client for client, stage in gone if stage != UNMASK}
        assert (found.counted, found.clipped) == (counted, 0), clients.refused

        counts = jnp.asarray([float(client in counted) for client in range(CLIENTS)])
        key = wire.Order.read(orders[0].content).key()
        J, B = jacobians(reference, counts, key)
        step = len(counted) * 2 * secure.most * secure.most_weight / 2**secure.bits
        bound = np.abs(J) @ bound + np.abs(B).sum(1) * step

        state = phase.merge(hp, state, jax.tree.map(jnp.asarray, found.upload))
        reference = after(reference, counts, key)
        error = np.abs(ravel_pytree(state)[0] - reference)
        assert (error <= bound + 1e-12).all()
        assert error.max() > 1e-3 * bound.max()
    assert bound.max() < 0.01 * np.abs(reference - ravel_pytree(start)[0]).max()
