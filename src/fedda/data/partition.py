"""Partitions of examples among clients: an ascending array of row numbers for each client."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from fedda.errors import InputError, unknown

Rows = npt.NDArray[np.int64]
Labels = npt.NDArray[np.integer[Any]]

FORMS = ("iid", "dirichlet:ALPHA", "pachinko[:ALPHA]", "user")
KINDS = ("iid", "dirichlet", "pachinko", "user")


def parse(text: str) -> tuple[str, float | None]:
    """Return the kind and the alpha of `iid`, `dirichlet:ALPHA`, `pachinko[:ALPHA]` or `user`.

    The alpha of Pachinko allocation is that of the coarse labels, 0.1 by default.
    """
    kind, colon, alpha = text.partition(":")
    if kind not in KINDS:
        raise unknown("partition", text, FORMS)
    if (kind in ("iid", "user") and colon) or (kind == "dirichlet" and not colon):
        raise InputError(
            f"partition must be {', '.join(FORMS)}, got {text!r}. Only dirichlet and pachinko have "
            "an alpha, and dirichlet needs one, for example dirichlet:0.3."
        )
    if colon:
        return kind, _positive(alpha)
    return kind, 0.1 if kind == "pachinko" else None


def split(
    text: str,
    labels: Labels,
    clients: int,
    seed: int,
    coarse: Labels | None = None,
) -> list[Rows]:
    """Divide examples among clients.

    Args:
        text: The partition, as `parse` reads it. `user` is refused.
        labels: The class of each example.
        clients: The number of clients.
        seed: The seed of the random numbers.
        coarse: The coarse label of each example, which `pachinko` needs.

    Returns:
        The ascending rows of each client.

    Example:
        >>> [rows.tolist() for rows in split("iid", np.zeros(4, int), clients=2, seed=0)]
        [[0, 1], [2, 3]]
    """
    kind, alpha = parse(text)
    if alpha is None and kind == "iid":
        return iid(len(labels), clients, seed)
    if alpha is not None and kind == "dirichlet":
        return dirichlet(labels, clients, alpha, seed)
    if alpha is not None and coarse is not None:
        return pachinko(coarse, labels, clients, None, seed, coarse_alpha=alpha)
    why = "this data set has no coarse labels"
    if kind == "user":
        why = "user is for data sets that name their own clients"
    raise InputError(
        f"partition must be one that the data set allows, got {text!r} ({why}; use iid or "
        "dirichlet:ALPHA)"
    )


def iid(num_examples: int, clients: int, seed: int) -> list[Rows]:
    """Assign rows to clients at random. The sizes of clients differ by at most 1."""
    _check_clients(clients, num_examples)
    owner = np.random.default_rng(seed).permutation(np.arange(num_examples) % clients)
    return _rows_of(owner, clients)


def dirichlet(labels: Labels, clients: int, alpha: float, seed: int) -> list[Rows]:
    """Divide each class among the clients by shares drawn from Dirichlet(alpha, ..., alpha).

    The sizes of clients differ too. A client without examples gets one from the largest client.
    """
    _check_clients(clients, len(labels))
    alpha = _positive(alpha)
    rng = np.random.default_rng(seed)
    owner = np.empty(len(labels), np.int64)
    for label in np.unique(labels):
        rows = rng.permutation(np.flatnonzero(labels == label))
        log_weights = _log_gamma(rng, alpha, clients)
        weights = np.exp(log_weights - log_weights.max())
        # Rounding the running total, not each share, uses every row exactly once.
        cuts = np.rint(len(rows) * np.cumsum(weights / weights.sum())[:-1])
        owner[rows] = np.searchsorted(cuts, np.arange(len(rows)), side="right")
    sizes = np.bincount(owner, minlength=clients)
    for empty in np.flatnonzero(sizes == 0):
        largest = np.argmax(sizes)
        owner[rng.choice(np.flatnonzero(owner == largest))] = empty
        sizes[[largest, empty]] += [-1, 1]
    return _rows_of(owner, clients)


def pachinko(
    coarse: Labels,
    fine: Labels,
    clients: int,
    per_client: int | None,
    seed: int,
    coarse_alpha: float = 0.1,
    fine_alpha: float = 10.0,
) -> list[Rows]:
    """Assign rows to one client after another by Pachinko allocation, with coarse and fine labels.

    A client draws θ ~ Dirichlet(coarse_alpha) over the coarse labels and, for each coarse label c,
    φ_c ~ Dirichlet(fine_alpha) over its fine labels. The alphas are per coordinate. For each of its
    rows, the client draws a coarse label c ~ θ and a class f ~ φ_c, and takes a random unused row
    of this class. A class without unused rows is removed, and φ_c and θ are renormalised. So the
    classes of the last clients can differ from their θ.

    Args:
        coarse: The coarse label of each row.
        fine: The class of each row.
        clients: The number of clients.
        per_client: The number of rows of a client. None uses as many as possible. The remaining
            rows belong to no client.
        seed: The seed of the random numbers.
        coarse_alpha: The alpha of the coarse labels.
        fine_alpha: The alpha of the classes.
    """
    _check_clients(clients, len(fine))
    coarse_alpha, fine_alpha = _positive(coarse_alpha), _positive(fine_alpha)
    most = len(fine) // clients
    per_client = most if per_client is None else per_client
    if not 1 <= per_client <= most:
        raise InputError(
            f"per_client must be between 1 and {most} ({len(fine)} examples over {clients} "
            f"clients), got {per_client} (use fewer clients or None for {most})"
        )
    rng = np.random.default_rng(seed)
    leaves, leaf_of_row = np.unique(np.stack([coarse, fine]), axis=1, return_inverse=True)
    leaf_of_row = leaf_of_row.ravel()  # NumPy 2.0 alone keeps the other axis
    is_child = np.unique(coarse)[:, None] == leaves[0]  # [coarse, leaf]

    # `stock` has the rows of each leaf in random order. The unused ones are start ... stop - 1.
    stock = np.lexsort((rng.random(len(fine)), leaf_of_row))
    stop = np.cumsum(np.bincount(leaf_of_row))
    start = np.append(0, stop[:-1])
    owner = np.full(len(fine), -1)
    for client in range(clients):
        log_theta = _log_gamma(rng, coarse_alpha, len(is_child))
        log_phi = _log_gamma(rng, fine_alpha, len(stop))
        wanted = per_client
        while wanted:
            # Draws are independent until a leaf is empty. So they are made in bulk, up to the draw
            # that empties a leaf. The others are drawn again without that leaf.
            usable = is_child & (start < stop)
            theta = np.where(usable.any(1), log_theta, -np.inf)
            phi = np.where(usable, log_phi, -np.inf)
            parent = _categorical(rng, np.tile(theta, (min(wanted, 256), 1)))
            leaf = _categorical(rng, phi[parent])
            drawn = np.cumsum(leaf[:, None] == np.arange(len(stop)), axis=0)
            place = start[leaf] + np.take_along_axis(drawn, leaf[:, None], 1)[:, 0] - 1
            empties = np.flatnonzero(place == stop[leaf] - 1)
            kept = empties[0] + 1 if len(empties) else len(leaf)
            owner[stock[place[:kept]]] = client
            start = start + drawn[kept - 1]
            wanted -= kept
    return _rows_of(owner, clients)


def _rows_of(owner: npt.NDArray[np.int64], clients: int) -> list[Rows]:
    """Return the ascending rows of each client, given the client of each row (or -1 for none)."""
    rows = np.argsort(owner, kind="stable")
    # The first piece has the rows of no client.
    return np.split(rows, np.searchsorted(owner[rows], np.arange(clients)))[1:]


def _log_gamma(rng: np.random.Generator, alpha: float, size: int) -> npt.NDArray[np.float64]:
    """Return logarithms of Gamma(alpha) variates: Dirichlet(alpha) shares up to a common factor.

    For a small alpha, the shares themselves would underflow to zero, and zeros cannot be
    renormalised. Gamma(a) is distributed as Gamma(a + 1) exp(-Exponential(1) / a).
    """
    return np.log(rng.gamma(alpha + 1, size=size)) - rng.exponential(size=size) / alpha


def _categorical(
    rng: np.random.Generator, log_weights: npt.NDArray[np.float64]
) -> npt.NDArray[np.int64]:
    """Draw an index for each row, by the Gumbel-max trick. The weights need not add up to 1."""
    index: npt.NDArray[np.int64] = np.argmax(
        log_weights + rng.gumbel(size=log_weights.shape), axis=1
    )
    return index


def _check_clients(clients: int, num_examples: int) -> None:
    if not 1 <= clients <= num_examples:
        raise InputError(
            f"clients must be between 1 and the number of examples, {num_examples}, got {clients} "
            f"(use {'fewer' if clients > num_examples else 'more'} clients)"
        )


def _positive(alpha: float | str) -> float:
    try:
        value = float(alpha)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise InputError(f"alpha must be a positive finite number, got {alpha!r} (for example 0.3)")
    return value
