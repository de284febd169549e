"""Secure aggregation shows no single upload, and refuses replies that nobody could use."""

import io
import pickle

import numpy as np
import pytest
from flwr.app import (
    ConfigRecord,
    Context,
    Message,
    RecordDict,
)
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from scipy import stats

from fedda import algorithms
from fedda.flower import client_app, messages, secure_mods
from fedda.flower.aggregation import AggregationError
from helpers.secure_federation import (
    CLIENTS,
    COLLECT,
    CONFIGS,
    LIKE,
    NODES,
    SECURE,
    SETUP,
    SHARE,
    TASK,
    UNMASK,
    UPLOADS,
    Federation,
    Upload,
    assert_sum,
    examples,
    federation,
    form_of,
    message_to,
    sender,
    upload,
)

pytestmark = pytest.mark.usefixtures("x64")


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
    """The whole numbers that the mod makes of an upload."""
    model, weight = own.moved
    moved = np.concatenate([model["bias"].ravel(), model["kernel"].ravel()]) / secure.most
    parts = np.concatenate([moved / 8, [weight / 8], own.control / secure.most])
    return np.rint((parts + 1) * 2 ** (secure.bits - 1)).astype(np.int64)


def test_what_arrives_of_a_client_looks_random_and_is_new_each_time():
    first, second = wide_federation(), wide_federation()
    first.sum(WIDE)
    second.sum(WIDE)
    for client, vector in masked(first).items():
        own = in_plain(upload(client, 1500))
        assert looks_random(vector)
        assert not looks_random(own)
        assert len(vector) == len(own) + 4, "and loss, examples and two flags"
        assert abs(np.corrcoef(vector[:-4], own)[0, 1]) < 5 / np.sqrt(len(own))
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
        assert set(configs.pop("fedda")) == {"serial", "partition"}
        assert set(configs.pop(CONFIGS)) == {"masked_params"}
        assert {key: dict(value) for key, value in configs.items()} == {
            "fitres.metrics": {},
            "fitres.status": {"code": 0, "message": ""},
        }


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
    "no keys": (SETUP, without_record, "pk1 must be bytes"),
    "no key at all": (SETUP, setting("pk1", lambda _: b"none"), "cannot be used"),
    "a key of another type": (SETUP, setting("pk2", lambda _: 3), "pk2 must be bytes"),
    "shares for others": (
        SHARE,
        setting("dsts", lambda to: [*to[:-1], 5]),
        "not those of the clients",
    ),
    "shares missing": (
        SHARE,
        setting("ctxts", lambda texts: texts[1:]),
        "not those of the clients",
    ),
    "a long share": (
        SHARE,
        setting("ctxts", lambda texts: [bytes(9999), *texts[1:]]),
        "at most 4096 bytes",
    ),
    "numbers for shares": (
        SHARE,
        setting("ctxts", lambda texts: [1] * len(texts)),
        "at most 4096 bytes",
    ),
    "no vector": (COLLECT, without_record, "masked_params must be list"),
    "a short vector": (COLLECT, vector(lambda own: saved(own[1:])), "contains int64"),
    "one entry for all": (COLLECT, vector(lambda own: saved(own[:1])), "contains int64"),
    "a vector of floats": (
        COLLECT,
        vector(lambda own: saved(own.astype(float))),
        "contains float64",
    ),
    "a long vector": (COLLECT, vector(lambda own: saved(np.tile(own, 99))), "expected at most"),
    "no array": (COLLECT, vector(lambda own: b"none"), "cannot be read"),
    "a pickle": (COLLECT, vector(lambda own: pickle.dumps(1)), "cannot be read"),
    "an archive": (COLLECT, vector(zipped), "contains no array"),
    "a pickle inside": (COLLECT, vector(lambda own: saved(np.array([{}]))), "cannot be read"),
    "another order": (COLLECT, another_order, "does not answer the order"),
    "no shares": (UNMASK, without_record, "nids must be list"),
    "shares of others": (UNMASK, setting("nids", lambda of: of[::-1]), "not those of the clients"),
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
    with pytest.raises(AggregationError, match="too few"):
        clients.sum(LIKE)
    assert len(clients.refused) == CLIENTS - 1
    assert all("same public key" in reason for reason in clients.refused.values())


@pytest.mark.parametrize("byte", [4, -1])  # of the secret, or of what fills it up
def test_a_wrong_share_is_noticed(byte):
    def spoil(client, stage, content):
        if (client, stage) == (1, UNMASK):
            share = bytearray(content[CONFIGS]["shares"][0])
            share[byte] ^= 1
            content[CONFIGS]["shares"] = [bytes(share), *content[CONFIGS]["shares"][1:]]

    with pytest.raises(
        AggregationError, match="wrong share" if byte == 4 else "do not fit together"
    ):
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
    assert "control" in clients.refused[1]


@pytest.mark.parametrize("kind", ["train", "train.default"])
def test_a_client_gives_no_upload_in_plain(kind):
    app, context = sender(0, UPLOADS[0]), Context(1, NODES[0], {}, RecordDict(), {})
    with pytest.raises(messages.MessageError, match="unmasked upload"):
        app(message_to(0, kind=kind), context)


def test_a_client_answers_a_query_and_does_not_tell_how_many_examples_it_has():
    app = client_app(TASK, lambda context: examples(0), mods=secure_mods())
    context = Context(1, NODES[0], {"partition-id": 0}, RecordDict(), {})
    reply = app(Message(RecordDict(), NODES[0], "query"), context)
    assert reply.content["fedda"] == {"partition": 0, "algorithms": algorithms.names()}


@pytest.mark.parametrize(("shares", "needed"), [(1, 1), (4, 2), (5, 1)])
def test_a_client_refuses_a_threshold_that_half_of_the_others_reach(shares, needed):
    setup = {"stage": SETUP, "sample_num": 5, "share_num": shares, "threshold": needed}
    setup |= {"clipping_range": 1.0, "target_range": 2**22, "mod_range": 2**32, "max_weight": 1.0}
    message = message_to(0, {CONFIGS: ConfigRecord(setup)})
    with pytest.raises(messages.MessageError, match=f"{needed} of {shares} shares"):
        sender(0, UPLOADS[0])(message, Context(1, NODES[0], {}, RecordDict(), {}))
