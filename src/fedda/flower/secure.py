"""Secure aggregation: the server learns the sum of the clients' uploads, and no single one.

Flower's SecAgg+ does it: its mod masks an upload at the client, and its workflow removes the masks
from the sum. `masking` makes an upload the vector that the mod expects, `unmasking` leads the
workflow through its stages with the messages of a phase, and here is what both agree on.

    setup       each client makes keys
    share       each gives the others shares of its secrets, encrypted, by way of the server
    collect     each works for the phase and uploads its vector, in whole numbers and masked
    unmask      those that are left give the shares that remove the masks from the sum

A client may be lost at every stage: one that was lost before it uploaded does not count, and its
masks are removed; one that was lost afterwards counts. If too few are left, nobody counts.

The server learns the sums over the clients that counted, of their uploads, of their weights and of
what they have seen; who they are; and how many of them had to be clipped. It learns no more if it
keeps to the protocol and fewer clients than the threshold help it. But Flower draws the masks from
a Mersenne Twister that is seeded with 32 bits: they keep uploads from being seen, and do not
withstand an attack on them. And what two sums have in common is no secret: if the same model is
sent twice, as when the second exchange of a round fails and the first is repeated, their difference
is the upload of whoever is in one of them alone. Against that only noise helps.
"""

import math
from typing import NamedTuple

import jax
import numpy as np
from flwr.app import ConfigRecord, RecordDict
from flwr.common import Code, FitRes, Status, ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common.recorddict_compat import fitres_to_recorddict

from fedda.core.local import Weighted, is_counter, is_weighted
from fedda.core.task import Plan
from fedda.core.tree import PyTree
from fedda.errors import InputError
from fedda.simulate.cohort import work_of

RANGES = "secure.ranges"  # the record that tells a client how large its entries may be
MODULUS = 2**32  # the largest that Flower allows
FLAGS = 2  # entries after those of the upload: 1, and whether one was clipped


class Secure(NamedTuple):
    """How uploads are made into whole numbers, and how many clients may be lost.

    An entry is clipped to the range from -r to r, and rounded at random and without bias to one of
    2^bits steps. So an entry of a sum of n uploads, none of them clipped, is off by less than
    n * 2 r / 2^bits. Here r is `most` for a plain entry, and `most` times `most_weight` for one
    that was multiplied by a weight. For a counter, such as the number of local steps, the most
    steps that a client takes stand in place of `most`, if they are more. Weights that are whole
    numbers are summed without error if `most_weight` is at most 2^(bits - 1).
    """

    most: float  # of an entry of an upload, after a weighted one was divided by its weight
    most_weight: float  # the most examples that a client has
    most_loss: float = 100.0  # of a client's mean loss, which is only shown
    bits: int = 22
    neighbours: int | None = None  # with whom a client shares secrets, itself too; None: all
    threshold: float = 2 / 3  # of these, the part that must be left at the end

    def check(self, asked: int) -> None:
        """Refuses what cannot work with so many clients."""
        for name in ("most", "most_weight", "most_loss"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise InputError(f"{name} of secure must be a positive number, got {value}.")
        if not 0.5 < self.threshold < 1:
            raise InputError(
                f"threshold of secure must be above 0.5 and below 1, got {self.threshold}. Half of "
                f"the shares of a client must not do, or both of its secrets could be asked for."
            )
        near = self.neighbours
        if near is not None and (near < 3 or near % 2 == 0):
            raise InputError(f"neighbours of secure must be an odd number from 3 on, got {near}.")
        if asked < 2:
            raise InputError("a sum over one client is its upload. Ask two or more.")
        if not 1 <= self.bits <= 30 or asked * 2**self.bits >= MODULUS:
            most = min(30, 31 - math.floor(math.log2(asked)))
            raise InputError(
                f"bits of secure must be 1 to {most}, lest a sum over {asked} clients overflow; "
                f"got {self.bits}."
            )

    def shares(self, asked: int) -> int:
        """With how many each client shares its secrets, itself included."""
        return min(self.neighbours or asked, asked)

    def needed(self, asked: int) -> int:
        """How many of these must be left at the end."""
        shares = self.shares(asked)
        return max(2, shares // 2 + 1, int(self.threshold * shares))

    def ranges(self, like: PyTree, plan: Plan) -> PyTree:
        """How large the entries of each leaf may be, of an upload and of what was seen."""
        whole = math.ceil(self.most_weight)
        work = work_of(plan, np.array(whole))
        visited = float(work.examples)
        weight = 2.0 ** math.ceil(math.log2(whole))  # so that whole numbers stay whole

        most_count = max(self.most, float(work.computed))  # a counter holds steps, or less

        def entries(times: float, part: PyTree) -> PyTree:
            def of(part: PyTree) -> PyTree:
                most = most_count if is_counter(part) else self.most
                return jax.tree.map(lambda _: most * times, part)

            return jax.tree.map(of, part, is_leaf=is_counter)

        def of(part: PyTree) -> PyTree:
            if not is_weighted(part):
                return entries(1, part)
            return Weighted(entries(whole, part.sum), weight)

        upload = jax.tree.map(of, like, is_leaf=lambda part: is_weighted(part) or is_counter(part))
        return {
            "upload": upload,
            "seen": {"loss": self.most_loss * visited, "examples": visited},
        }


def protocol_part(content: RecordDict) -> ConfigRecord:
    """What Flower's mod and its workflow say to each other in a message."""
    return content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())


def fitres(arrays: list[np.ndarray]) -> RecordDict:
    """Flower's older form of a reply, in which its mod and its workflow speak."""
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(arrays), 1, {})
    return fitres_to_recorddict(result, keep_input=True)
