import os
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest

from fedda.data import partition
from fedda.data.readers import cifar_python
from helpers.labels import label_histogram

LABELS = np.random.default_rng(0).permutation(np.repeat(np.arange(10), 60))
COARSE = LABELS // 4


def near(samples, expected):
    """The mean of independent samples is within four standard errors of `expected`."""
    samples = np.asarray(samples, float)
    error = samples.std(ddof=1) / np.sqrt(len(samples))
    assert abs(samples.mean() - expected) < 4 * error, (samples.mean(), expected, error)


def squared_shares(alpha, k):
    """E Σ p² for p ~ Dirichlet(alpha) over k coordinates, from E p_i² = (α + 1) / (k (kα + 1))."""
    return (alpha + 1) / (k * alpha + 1)


def same(one, other):
    return len(one) == len(other) and all(map(np.array_equal, one, other))


@pytest.mark.parametrize(
    "text", ["iid", "dirichlet:0.1", "dirichlet:1e-3", "dirichlet:100", "pachinko"]
)
def test_every_row_belongs_to_exactly_one_client(text):
    parts = partition.split(text, LABELS, 30, 3, coarse=COARSE)
    assert len(parts) == 30
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))
    for rows in parts:
        assert rows.dtype == np.int64
        assert len(rows) > 0
        assert (np.diff(rows) > 0).all()


@pytest.mark.parametrize("text", ["iid", "dirichlet:0.3", "pachinko"])
def test_the_seed_and_nothing_else_decides(text):
    first, again, other = (
        partition.split(text, LABELS, 12, seed, coarse=COARSE) for seed in (1, 1, 2)
    )
    assert same(first, again)
    assert not same(first, other)


def test_iid_sizes_differ_by_at_most_one():
    sizes = [len(rows) for rows in partition.iid(103, 10, 0)]
    assert sorted(sizes) == [10] * 7 + [11] * 3


def test_iid_is_shuffled():
    # A row's client is uniform, so the first ten rows reach about 10 (1 - 0.9^10) = 6.5 clients;
    # dealing in blocks would give 1 and dealing in turn 10, each without variance.
    reached = [sum(rows[0] < 10 for rows in partition.iid(10_000, 10, seed)) for seed in range(300)]
    near(reached, 10 * (1 - 0.9**10))


@pytest.mark.parametrize("alpha", [0.05, 0.3, 2.0])
def test_dirichlet_concentration(alpha):
    classes, size, clients = 10, 2000, 8
    labels = np.repeat(np.arange(classes), size)
    samples = []
    for seed in range(30):
        counts = label_histogram(labels, partition.dirichlet(labels, clients, alpha, seed), classes)
        samples.extend(np.square(counts / size).sum(0))
    near(samples, squared_shares(alpha, clients))


def test_dirichlet_favours_no_client():
    # Few rows and many clients: flooring the cuts would take half a row per class from client 0
    # and give it to the last.
    labels = np.repeat(np.arange(50), 20)
    sizes = np.array(
        [[len(rows) for rows in partition.dirichlet(labels, 10, 1.0, seed)] for seed in range(60)]
    )
    for client in (0, 5, 9):
        near(sizes[:, client], 100)


def test_dirichlet_of_a_large_alpha_is_iid():
    size, clients, alpha = 1000, 10, 1e8
    labels = np.repeat(np.arange(5), size)
    counts = label_histogram(labels, partition.dirichlet(labels, clients, alpha, 0), 5)
    # A share's standard deviation is sqrt((1/K)(1 - 1/K) / (Kα + 1)); the cuts round by 1 in all.
    deviation = np.sqrt(0.1 * 0.9 / (clients * alpha + 1))
    assert np.abs(counts - size / clients).max() <= 1 + 5 * size * deviation


def test_dirichlet_takes_from_the_largest_for_the_empty():
    # One class and a tiny alpha: one client holds all, so the other nine are given one row each.
    parts = partition.dirichlet(np.zeros(50, int), 10, 1e-6, 0)
    assert sorted(len(rows) for rows in parts) == [1] * 9 + [41]
    parts = partition.dirichlet(np.zeros(10, int), 10, 1e-6, 0)
    assert [len(rows) for rows in parts] == [1] * 10


@pytest.mark.parametrize(("coarse_alpha", "fine_alpha"), [(0.1, 10.0), (0.5, 0.5)])
def test_pachinko_concentration(coarse_alpha, fine_alpha):
    # The chance that two draws agree, which counts estimate without bias as
    # Σ n (n - 1) / (m (m - 1)), is Σ p²: of θ for coarse labels, of φ_c for fine ones within c.
    stock, m = 4000, 100
    fine = np.repeat(np.arange(100), stock)
    parts = partition.pachinko(fine // 5, fine, 300, m, 0, coarse_alpha, fine_alpha)
    counts = label_histogram(fine, parts, 100)
    assert counts.sum(0).max() < stock  # plentiful: nothing ran out
    by_coarse = counts.reshape(300, 20, 5)
    n = by_coarse.sum(2)
    near((n * (n - 1)).sum(1) / (m * (m - 1)), squared_shares(coarse_alpha, 20))
    # φ is independent of n, so choosing the well-filled coarse labels leaves no bias.
    filled = n >= 10
    agree = (by_coarse * (by_coarse - 1)).sum(2)[filled] / (n * (n - 1))[filled]
    near(agree, squared_shares(fine_alpha, 5))


def test_pachinko_renormalises_within_the_coarse_label():
    # Coarse 0 is one row of fine 0 and fifty of fine 1. Losing fine 0 must leave θ_0 as it was,
    # so both rows of a client come from coarse 0 with probability E θ_0² = (α + 1) / (2 (2α + 1)).
    fine = np.array([0] + [1] * 50 + [2] * 50)
    both = [
        (fine[partition.pachinko(fine // 2, fine, 1, 2, seed, 0.5)[0]] < 2).all()
        for seed in range(3000)
    ]
    near(both, squared_shares(0.5, 2) / 2)


def test_pachinko_keeps_the_draw_that_empties_a_class():
    # Three draws, and two rows in coarse 0: both are taken if at least two draws fall on coarse 0,
    # with probability 1/2 by symmetry, whatever is deleted after that.
    fine = np.array([0, 0, 1, 1, 1])
    both = [
        {0, 1} <= set(partition.pachinko(fine, fine, 1, 3, seed, coarse_alpha=0.5)[0])
        for seed in range(3000)
    ]
    near(both, 0.5)


@pytest.mark.parametrize("text", ["dirichlet:1e8", "pachinko"])
def test_rows_of_a_class_are_taken_at_random(text):
    one_class = np.zeros(100, int)
    near(
        [
            partition.split(text, one_class, 2, seed, coarse=one_class)[0].mean()
            for seed in range(300)
        ],
        49.5,
    )


@pytest.mark.parametrize(("clients", "per_client", "size"), [(7, 50, 50), (7, None, 85)])
def test_pachinko_sizes(clients, per_client, size):
    parts = partition.pachinko(COARSE, LABELS, clients, per_client, 0)
    assert [len(rows) for rows in parts] == [size] * clients
    assert len(np.unique(np.concatenate(parts))) == size * clients


def test_pachinko_survives_vanishing_alphas():
    # Shares of 10^(-10^8) are zero as floats, yet must still renormalise when the others run out.
    parts = partition.pachinko(COARSE, LABELS, 1, None, 0, 1e-8, 1e-8)
    np.testing.assert_array_equal(parts[0], np.arange(len(LABELS)))


def one_image_at_a_time(fine, clients, per_client, rng):
    """Pachinko allocation in the plainest way, for five fine labels to a coarse one."""
    left = [np.flatnonzero(fine == label).tolist() for label in range(100)]
    histogram = np.zeros((clients, 100), int)
    for own in histogram:
        theta = [rng.gammavariate(0.1, 1) for _ in range(20)]  # unnormalised Dirichlet(0.1)
        phi = [[rng.gammavariate(10, 1) for _ in range(5)] for _ in range(20)]
        for _ in range(per_client):
            for c in range(20):
                if not any(left[5 * c : 5 * c + 5]):
                    theta[c] = 0
            (c,) = rng.choices(range(20), theta)
            weights = [phi[c][i] if left[5 * c + i] else 0 for i in range(5)]
            label = 5 * c + rng.choices(range(5), weights)[0]
            left[label].pop()
            own[label] += 1
    return histogram


def spread(histogram):
    """Fine and coarse labels of a client, also of the last fifth, and the largest coarse share."""
    coarse = histogram.reshape(len(histogram), 20, 5).sum(2)
    fine_labels = (histogram > 0).sum(1)
    return [
        fine_labels.mean(),
        fine_labels[-len(histogram) // 5 :].mean(),
        (coarse > 0).sum(1).mean(),
        (coarse.max(1) / coarse.sum(1)).mean(),
    ]


@pytest.mark.parametrize(("stock", "clients", "seeds"), [(500, 500, 3), (100, 100, 12)])
def test_pachinko_of_cifar100_is_as_one_image_at_a_time(stock, clients, seeds):
    fine = np.random.default_rng(0).permutation(np.repeat(np.arange(100), stock))
    ours, plain = [], []
    for seed in range(seeds):
        start = time.perf_counter()
        parts = partition.pachinko(fine // 5, fine, clients, 100, seed)
        assert time.perf_counter() - start < 10  # 0.2 s when written
        assert [len(rows) for rows in parts] == [100] * clients
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(fine)))
        ours.append(spread(label_histogram(fine, parts, 100)))
        plain.append(spread(one_image_at_a_time(fine, clients, 100, random.Random(seed))))
    ours, plain = np.array(ours), np.array(plain)
    error = np.sqrt((ours.var(0, ddof=1) + plain.var(0, ddof=1)) / seeds)
    # Five errors, because so few seeds know them only roughly.
    assert (np.abs(ours.mean(0) - plain.mean(0)) < 5 * error).all(), (ours, plain)
    if clients == 500:
        # A client of the partition that was published has about 21 of the 100 labels.
        assert abs(ours[:, 0].mean() - 21) < 1.5


@pytest.mark.parametrize(("split", "clients"), [("train", 500), ("test", 100)])
def test_pachinko_of_the_real_labels(split, clients):
    if "FEDDA_TEST_DATA" not in os.environ:
        pytest.skip("set FEDDA_TEST_DATA to a folder with cifar-100-python")
    source = cifar_python.read(Path(os.environ["FEDDA_TEST_DATA"]), "cifar100")
    ((_, columns),) = source.splits[split]
    parts = partition.split("pachinko", columns["y"], clients, 1, coarse=columns["coarse"])
    assert [len(rows) for rows in parts] == [100] * clients
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(100 * clients))
    labels = (label_histogram(columns["y"], parts, 100) > 0).sum(1)
    coarse = (label_histogram(columns["coarse"], parts, 20) > 0).sum(1)
    assert 18 < labels.mean() < 25  # without the skew: 100 (1 - 0.99^100) = 63
    assert 5 < coarse.mean() < 8  # without the skew: 20 (1 - 0.95^100) = 19.9


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("iid", ("iid", None)),
        ("dirichlet:0.3", ("dirichlet", 0.3)),
        ("pachinko", ("pachinko", 0.1)),
        ("pachinko:0.5", ("pachinko", 0.5)),
        ("user", ("user", None)),
    ],
)
def test_parse(text, parsed):
    assert partition.parse(text) == parsed


def test_split_passes_alpha_on():
    assert same(
        partition.split("pachinko:0.5", LABELS, 9, 4, coarse=COARSE),
        partition.pachinko(COARSE, LABELS, 9, None, 4, coarse_alpha=0.5),
    )
    assert same(
        partition.split("dirichlet:0.5", LABELS, 9, 4), partition.dirichlet(LABELS, 9, 0.5, 4)
    )


FORMS = "partition must be iid, dirichlet:ALPHA, pachinko[:ALPHA], user, got "
ALPHA = "alpha must be a positive finite number, got "


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "dirichlett:0.3",
            "unknown partition 'dirichlett:0.3'. Did you mean dirichlet:ALPHA? Known: ",
        ),
        ("zzz", "unknown partition 'zzz'. Known: dirichlet:ALPHA, iid, pachinko[:ALPHA], user."),
        ("", "unknown partition ''. Known: "),
        ("iid:0.3", FORMS + "'iid:0.3'. Only dirichlet and pachinko have an alpha"),
        ("user:3", FORMS + "'user:3'. Only dirichlet and pachinko have an alpha"),
        ("dirichlet", FORMS + "'dirichlet'. Only dirichlet and pachinko have"),
        ("dirichlet:", ALPHA + "'' (for example 0.3)"),
        ("dirichlet:0,3", ALPHA + "'0,3' (for example 0.3)"),
        ("dirichlet:0", ALPHA + "'0' (for example 0.3)"),
        ("pachinko:-1", ALPHA + "'-1' (for example 0.3)"),
        ("dirichlet:nan", ALPHA + "'nan' (for example 0.3)"),
        ("pachinko:inf", ALPHA + "'inf' (for example 0.3)"),
        ("pachinko", "got 'pachinko' (this data set has no coarse labels; use iid or dirichlet:"),
        ("user", "got 'user' (user is for data sets that name their own clients; use iid or diri"),
    ],
)
def test_bad_text(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        partition.split(text, LABELS, 10, 0)


@pytest.mark.parametrize("text", ["iid", "dirichlet:1", "pachinko"])
@pytest.mark.parametrize(("clients", "fix"), [(601, "fewer"), (0, "more")])
def test_bad_number_of_clients(text, clients, fix):
    message = (
        f"clients must be between 1 and the number of examples, 600, got {clients} "
        f"(use {fix} clients)"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        partition.split(text, LABELS, clients, 0, coarse=COARSE)


@pytest.mark.parametrize("per_client", [0, 61])
def test_bad_per_client(per_client):
    message = (
        f"per_client must be between 1 and 60 (600 examples over 10 clients), got {per_client}"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        partition.pachinko(COARSE, LABELS, 10, per_client, 0)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_alpha_without_the_command_line(alpha):
    with pytest.raises(ValueError, match=ALPHA):
        partition.dirichlet(LABELS, 10, alpha, 0)
    with pytest.raises(ValueError, match=ALPHA):
        partition.pachinko(COARSE, LABELS, 10, None, 0, coarse_alpha=alpha)
    with pytest.raises(ValueError, match=ALPHA):
        partition.pachinko(COARSE, LABELS, 10, None, 0, fine_alpha=alpha)
