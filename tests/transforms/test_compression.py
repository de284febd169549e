"""Codecs against NumPy, their packets against a count by hand, and compressed runs against plain.

Statistics are of fixed keys, so they pass or fail for good. Their bounds are such that a sound
codec fails with one in a million sets of keys.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax import random

import fedda
from fedda import algorithms, api
from fedda.core import tree
from fedda.core.algorithm import Phase, Seen
from fedda.core.local import Weighted
from fedda.core.losses import squared_error
from fedda.core.round import traffic
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients
from fedda.errors import InputError
from fedda.transforms import compression

CODECS = {
    "top_k": compression.top_k(0.1),
    "random_k": compression.random_k(0.1),
    "8 bits": compression.quantised(8),
    "4 bits": compression.quantised(4),
}
every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
with_feedback = pytest.mark.parametrize("name", ["top_k", "random_k"])
RARE = 1e-6


@functools.partial(jax.jit, static_argnums=0)
def encode(codec, key, memory, upload):
    return codec.encode(key, memory, upload)


@functools.partial(jax.jit, static_argnums=0)
def decode(codec, packet):
    return codec.decode(packet)


def through(codec, x, seed=0):
    """One array, as it arrives."""
    packet, _ = encode(codec, random.key(seed), codec.init(x), x)
    return decode(codec, packet)


def numbers(*shape, seed=0, scale=1.0):
    return jax.device_put(scale * np.random.default_rng(seed).normal(size=shape))


# --------------------------------------------------------------------------------- single arrays


@pytest.mark.usefixtures("x64")
def test_top_k_takes_what_numpy_takes():
    x = numbers(40, 25)
    flat = np.asarray(x).ravel()
    places = np.argpartition(-np.abs(flat), 100)[:100]
    expected = np.zeros(1000)
    expected[places] = flat[places]
    np.testing.assert_array_equal(through(CODECS["top_k"], x), expected.reshape(40, 25))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("share", [0.001, 0.1, 0.5])
def test_top_k_leaves_no_more_than_its_share(share):
    d = 1000
    k = round(share * d)
    inputs = [numbers(d, seed=seed) ** power for seed in range(5) for power in (1, 3, 9)]
    for x in [*inputs, jnp.ones(d)]:  # of equal numbers it leaves exactly that
        left = np.asarray(x - through(compression.top_k(share), x))
        assert left @ left <= (1 - k / d) * float(x @ x) * (1 + 1e-14)
    assert left @ left == d - k


def mixed(x):
    """The hash, written once more."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) % 2**32
    return x ^ (x >> 16)


@pytest.mark.parametrize(("number", "size"), [(50, 500), (51, 512), (300, 301), (256, 256)])
def test_drawn_places_are_those_that_plain_integers_give(number, size):
    for seed in (0, 1, 4_000_000_000):
        stretches = np.array_split(np.arange(size), number)
        expected = [
            stretch[mixed(mixed(turn) ^ seed) % len(stretch)]
            for turn, stretch in enumerate(stretches)
        ]
        places = jax.jit(compression.drawn_places, static_argnums=(1, 2))
        np.testing.assert_array_equal(places(np.uint32(seed), number, size), expected)


@pytest.mark.usefixtures("x64")
def test_random_k_takes_every_entry_equally_often():
    d, k, draws = 300, 30, 4000
    codec = compression.random_k(k / d)

    @jax.jit
    @jax.vmap
    def arrived(key):
        packet, _ = codec.encode(key, codec.init(jnp.ones(d)), jnp.ones(d))
        return codec.decode(packet)

    taken = np.asarray(arrived(random.split(random.key(3), draws)))
    assert (taken.reshape(draws, k, d // k).sum(2) == 1).all()
    assert len(np.unique(taken, axis=0)) == draws
    # One of ten in each of 30 stretches: as many tests of equal frequency, of 9 degrees of freedom.
    expected = draws * k / d
    statistic = ((taken.sum(0) - expected) ** 2).sum() / expected
    low, high = scipy.stats.chi2.ppf([RARE / 2, 1 - RARE / 2], d - k)
    assert low < statistic < high
    # And what one stretch takes says nothing about the next.
    together = (
        taken[:, :-10].reshape(draws, k - 1, 10, 1) * taken[:, 10:].reshape(draws, k - 1, 1, 10)
    ).sum(0)
    statistic = ((together - draws / 100) ** 2).sum() / (draws / 100)
    low, high = scipy.stats.chi2.ppf([RARE / 2, 1 - RARE / 2], (k - 1) * 99)
    assert low < statistic < high


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("bits", [8, 4])
def test_quantised_is_right_on_average(bits):
    d, draws, most = 300, 4000, 2 ** (bits - 1) - 1
    x = numbers(d).at[0].set(0.0)
    codec = compression.quantised(bits)

    @jax.jit
    @jax.vmap
    def arrived(key):
        return codec.decode(codec.encode(key, codec.init(x), x)[0])

    flat = np.asarray(x)
    errors = np.asarray(arrived(random.split(random.key(0), draws))) - flat
    scale = np.where(np.arange(d) < 256, np.abs(flat[:256]).max(), np.abs(flat[256:]).max())
    step = scale / most
    above = np.mod(flat / step, 1)
    assert (np.abs(errors) < step * (1 + 1e-12)).all()
    # Each error is one of two values, so that its variance is known.
    variance = step**2 * above * (1 - above)
    free = variance > 1e-9
    assert free.sum() == d - 3  # 0 and the largest of both blocks are exact
    assert np.abs(errors[:, ~free]).max() < 1e-12
    z = errors[:, free].sum(0) / np.sqrt(draws * variance[free])
    assert np.abs(z).max() < scipy.stats.norm.isf(RARE / (2 * d))
    spread = (errors[:, free] ** 2).mean(0) / variance[free]
    assert abs(spread.mean() - 1) < 0.02


@pytest.mark.parametrize("size", [256, 600, 601])
def test_four_bits_are_two_to_a_byte(size):
    x = numbers(size).astype("float32")
    packet, _ = encode(compression.quantised(4), random.key(0), (), x)
    codes = np.asarray(packet.codes)
    assert codes.dtype == np.uint8
    assert codes.shape == ((size + 1) // 2,)
    whole = np.stack([codes % 16, codes // 16], 1).ravel()[:size].astype(int) - 8
    assert np.abs(whole).max() == 7
    scales = np.repeat(np.asarray(packet.scales), 256)[:size]
    arrived = decode(compression.quantised(4), packet)
    np.testing.assert_allclose(arrived, whole * scales / 7, rtol=1e-6)


@every_codec
def test_zeros_arrive_as_zeros(codec):
    assert not through(codec, jnp.zeros((30, 20))).any()


@every_codec
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_does_not_arrive_as_finite(codec, bad):
    for place in range(0, 600, 97):
        x = numbers(600, seed=place).astype("float32").at[place].set(bad)
        assert not np.isfinite(through(codec, x, seed=place)).all()


@every_codec
def test_small_arrays_and_whole_numbers_travel_as_they_are(codec):
    upload = {"bias": numbers(255), "count": jnp.arange(1000), "weight": jnp.ones(())}
    memory = codec.init(upload)
    packet, after = codec.encode(random.key(0), memory, upload)
    assert jax.tree.structure(packet) == jax.tree.structure(upload)
    jax.tree.map(np.testing.assert_array_equal, packet, upload)
    assert jax.tree.leaves((memory, after)) == []


@every_codec
def test_half_precision_stays_what_it_is(codec):
    x = numbers(400).astype("bfloat16")
    packet, memory = encode(codec, random.key(0), codec.init(x), x)
    assert decode(codec, packet).dtype == jnp.bfloat16
    assert {leaf.dtype for leaf in jax.tree.leaves(memory)} <= {jnp.bfloat16.dtype}
    assert tree.nbytes(packet) < tree.nbytes(x)


def test_places_that_do_not_exist_are_ignored():
    places = jnp.asarray([3, 300, 2**31 - 1], "int32")
    packet = compression.Chosen(places, jnp.asarray([1.0, 2.0, 3.0]), (300,))
    arrived = np.asarray(compression.top_k(0.01).decode(packet))
    assert arrived[3] == arrived.sum() == 1


# -------------------------------------------------------------------------------- error feedback


@pytest.mark.usefixtures("x64")
@with_feedback
def test_what_arrived_and_what_is_owed_is_what_was_given(name):
    codec, rounds = CODECS[name], 40
    uploads = [
        {"kernel": numbers(30, 20, seed=r), "bias": numbers(20, seed=-r - 1 + 100)}
        for r in range(rounds)
    ]
    memory, arrived = codec.init(uploads[0]), tree.zeros_like(uploads[0])
    for number, upload in enumerate(uploads):
        packet, memory = encode(codec, random.key(number), memory, upload)
        arrived = tree.add(arrived, decode(codec, packet))
    given = functools.reduce(tree.add, uploads)
    kernel = arrived["kernel"] + memory["kernel"]
    np.testing.assert_allclose(kernel, given["kernel"], rtol=0, atol=1e-12)
    np.testing.assert_array_equal(arrived["bias"], given["bias"])
    assert memory["bias"] == ()
    # What is owed does not grow with the rounds: it is a few rounds' worth.
    assert np.linalg.norm(memory["kernel"]) < 2 / 0.1 * np.linalg.norm(uploads[0]["kernel"])


@pytest.mark.usefixtures("x64")
@with_feedback
def test_what_is_owed_is_a_part_of_a_mean(name):
    # The same upload under any weight leaves the same behind, and arrives with that weight.
    codec, x = CODECS[name], numbers(500)
    algorithm = compression.compressed(
        uploading(lambda hp: Weighted(hp.client_lr * x, hp.client_lr)), codec
    )
    (phase,) = algorithm.phases

    def visit(weight):
        hp = algorithm.Hyper(jnp.asarray(weight))
        packet, memory, _ = phase.work(
            hp,
            None,
            None,
            compression.Memory((), (codec.init(Weighted(x, x[0])),)),
            None,
            random.key(0),
        )
        return phase.decode(packet), memory.codec[0].sum

    (one, owed), (other, owed_too) = visit(1.0), visit(8.0)
    np.testing.assert_array_equal(owed, owed_too)
    np.testing.assert_array_equal(8 * one.sum, other.sum)
    assert (one.weight, other.weight) == (1, 8)


def uploading(upload):
    """An algorithm whose clients upload a function of the hyper-parameters."""
    fedavg = algorithms.get("fedavg")
    nothing = Seen(jnp.zeros(()), jnp.zeros(()))

    def work(hp, task, message, memory, shard, key):
        return upload(hp), memory, nothing

    return fedavg._replace(phases=(Phase(fedavg.phases[0].send, work, fedavg.phases[0].merge),))


# ----------------------------------------------------------------------------------- whole rounds

IN, OUT = 16, 32  # 512 weights, which are coded, and 32 biases, which are not
COUNTS = (12, 8, 15, 9, 12, 6, 10, 12)


def init(key):
    return {"kernel": jnp.zeros((IN, OUT)), "bias": jnp.zeros(OUT)}


def apply(params, x):
    return x @ params["kernel"] + params["bias"][None]


MODEL = fedda.Model(init, apply)
SETTINGS = {"batch": 6, "local_work": 2, "cohort": 4, "client_lr": 0.1}


@functools.lru_cache
def quadratic(poisoned=None):
    """Clients with linear maps of their own, near a common one; one may have overflowing inputs."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(IN, OUT))
    found = []
    for number, count in enumerate(COUNTS):
        x = rng.normal(size=(count, IN))
        y = x @ (common + 0.3 * rng.normal(size=(IN, OUT)))
        found.append((x * (1e200 if number == poisoned else 1), y))
    return found


def run(algorithm, clients=None, **settings):
    clients = quadratic() if clients is None else clients
    return fedda.run(algorithm, MODEL, clients, squared_error, **(SETTINGS | settings))


def assert_near(one, other, tolerance=1e-11):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=tolerance), one, other)


BYTES = {  # of an array of 16 x 32 numbers of 4 bytes
    "top_k": 51 * (4 + 4),
    "random_k": 4 + 51 * 4,
    "8 bits": 512 + 2 * 4,
    "4 bits": 256 + 2 * 4,
}


@pytest.mark.parametrize("name", CODECS)
def test_bytes_are_those_of_the_packet(name):
    algorithm = compression.compressed(algorithms.get("fedda-sgdm"), CODECS[name])
    hp = api.traced(algorithm.Hyper(), MODEL)
    task, shards = Task(MODEL, squared_error, Plan(6)), from_clients(quadratic())
    down, up = traffic(algorithm, task, hp, init(None), shards)
    gradients_and_momentum, weight = 2 * (BYTES[name] + OUT * 4), 4
    assert up == gradients_and_momentum + weight
    assert down == 2 * (IN * OUT + OUT) * 4


@pytest.mark.parametrize("name", CODECS)
def test_fedda_converges_as_if_nothing_were_left_out(name):
    x, y = (np.concatenate(columns) for columns in zip(*quadratic(), strict=True))
    rows = np.hstack([x, np.ones((len(x), 1))])
    best = np.square(rows @ np.linalg.lstsq(rows, y, rcond=None)[0] - y).mean()
    settings = {"test": (x, y), "rounds": 300, "eval_every": 300}
    plain = run("fedda-sgdm", **settings).history
    found = run(
        compression.compressed(algorithms.get("fedda-sgdm"), CODECS[name]), **settings
    ).history
    start, end, end_plain = (row["loss"] - best for row in (*found, plain[-1]))
    assert start > 10
    assert end_plain < 0.15
    assert abs(end - end_plain) < 0.02
    assert found[-1]["bytes_up"] < plain[-1]["bytes_up"] / 3


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["fedda-adam", "scaffold", "mime-sgdm", "climb"])
def test_with_nothing_left_out_the_run_is_the_plain_one(name):
    # Algorithms with nested weights, with memory, with two phases, and with all of these.
    algorithm = algorithms.get(name)
    plain = run(algorithm, rounds=4)
    codec = compression.top_k(1.0) if name == "climb" else compression.random_k(1.0)
    assert_near(plain.state, run(compression.compressed(algorithm, codec), rounds=4).state)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["random_k", "4 bits"])
def test_chunks_and_the_place_of_memory_change_only_rounding(name):
    algorithm = compression.compressed(algorithms.get("fedda-sgdm"), CODECS[name])
    one = run(algorithm, rounds=5, eval_every=2, chunk=1)
    assert_near(one.state, run(algorithm, rounds=5, eval_every=2, chunk=3).state)
    if name == "random_k":  # in 4 bits, nothing is kept
        on_host = run(algorithm, rounds=5, eval_every=2, chunk=3, memory_gb=5e-5)
        assert_near(one.state, on_host.state)


@pytest.mark.usefixtures("x64")
def test_runs_trained_together_equal_single_ones():
    algorithm = compression.compressed(algorithms.get("fedda-sgdm"), CODECS["random_k"])
    settings = SETTINGS | {"rounds": 3}
    settings.pop("client_lr")
    grid = {"client_lr": [0.05, 0.1]}
    points = fedda.run_grid(algorithm, MODEL, quadratic(), squared_error, grid=grid, **settings)
    for point in points:
        alone = run(algorithm, rounds=3, **point.hyper)
        assert_near(point.result.state, alone.state)


@pytest.mark.usefixtures("x64")
def test_a_client_that_is_not_finite_owes_nothing_of_it():
    # In a cohort of everybody, it counts as if it had no examples.
    algorithm = compression.compressed(algorithms.get("fedda-sgdm"), CODECS["random_k"])
    everyone = {"cohort": len(COUNTS), "rounds": 4, "eval_every": 4}
    shards = from_clients(quadratic(poisoned=3))
    found = run(algorithm, shards, **everyone)
    without = list(quadratic())
    without[3] = (np.zeros((0, IN)), np.zeros((0, OUT)))
    assert found.history[-1]["nonfinite_clients"] == 4
    assert_near(found.state, run(algorithm, without, **everyone).state)


def test_a_packet_survives_the_wire():
    pytest.importorskip("flwr")
    from fedda.flower import messages

    upload = Weighted(
        {"kernel": numbers(30, 20).astype("float32"), "bias": numbers(20)}, jnp.ones(())
    )
    for codec in CODECS.values():
        packet, _ = codec.encode(random.key(0), codec.init(upload), upload)
        like = jax.eval_shape(
            lambda codec=codec: codec.encode(random.key(0), codec.init(upload), upload)[0]
        )
        record = messages.pack(packet)
        arrived = codec.decode(messages.unpack(record, like))
        jax.tree.map(np.testing.assert_array_equal, arrived, codec.decode(packet))
        assert sum(
            np.prod(each.shape) * np.dtype(each.dtype).itemsize for each in record.values()
        ) == tree.nbytes(packet)


# -------------------------------------------------------------------------------------- refusals


def test_equal_requests_give_one_record():
    fedavg = algorithms.get("fedavg")
    one, again = (compression.compressed(fedavg, compression.top_k(0.1)) for _ in range(2))
    assert one is again
    assert compression.top_k(0.1) is not compression.top_k(0.2)


@pytest.mark.parametrize("share", [0, -0.1, 1.5, np.nan, "0.1"])
def test_a_share_is_a_share(share):
    for codec in (compression.top_k, compression.random_k):
        with pytest.raises(InputError, match=r"share must be a number in \(0, 1\]"):
            codec(share)


def test_bits_are_eight_or_four():
    with pytest.raises(InputError, match="bits must be 8 or 4, got 3"):
        compression.quantised(3)


def test_nothing_is_compressed_twice():
    once = compression.compressed(algorithms.get("fedavg"), compression.quantised(8))
    with pytest.raises(InputError, match="an algorithm with plain uploads"):
        compression.compressed(once, compression.top_k(0.1))


def test_uploads_of_unknown_shape_are_refused():
    def work(hp, task, message, memory, shard, key):
        x, _ = shard.rows(jnp.zeros(1, "int32"))
        return x[0, 3], memory, Seen(jnp.zeros(()), jnp.zeros(()))

    fedavg = algorithms.get("fedavg")
    reading = fedavg._replace(phases=(fedavg.phases[0]._replace(work=work),))
    with pytest.raises(InputError, match="shapes that depend only on the"):
        run(compression.compressed(reading, compression.top_k(0.1)), rounds=1)
