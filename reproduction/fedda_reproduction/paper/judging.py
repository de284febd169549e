"""What a verdict on a claim is, and when there is one."""

from typing import NamedTuple

HOLDS, SO_FAR, IN_PART = "holds", "holds so far", "holds in part"
FAILS, OPEN = "does not hold", "not settled"


class Verdict(NamedTuple):
    name: str
    claim: str
    verdict: str
    told: str  # in one sentence, what we found
    measured: str = ""  # the numbers behind it, if they are not in that sentence


def decided(won: int, judged: int, needed: int) -> str:
    """By the cases in which a claim is true, of those that were run, of those there are."""
    if won < judged:
        return IN_PART if won else FAILS
    if not judged:
        return OPEN
    return HOLDS if judged >= needed else SO_FAR
