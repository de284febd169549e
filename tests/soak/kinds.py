"""The kinds of tries, and the share of the time that each gets."""

from typing import NamedTuple


class Kind(NamedTuple):
    module: str  # of this package
    share: float
    about: str


KINDS = {
    "run": Kind("kills", 8, "`fedda run` is killed, and resumed"),
    "directory": Kind("kills", 3, "a run directory alone is killed, mostly while it writes"),
    "compare": Kind("kills", 5, "`fedda compare` is killed, and continued"),
    "sweep": Kind("kills", 4, "`fedda sweep` is killed, and continued"),
    "reproduce": Kind("kills", 4, "`fedda reproduce` is killed, and continued"),
    "import": Kind("kills", 3, "`fedda data import --replace` is killed, and repeated"),
    "flower": Kind("kills", 4, "a Flower server is killed, and started again"),
    "operations": Kind("damage", 2, "runs in one process, which die within an operation on a file"),
    "writers": Kind("writers", 2, "two processes want one directory, and one may be killed"),
    "signals": Kind("signals", 5, "every signal, once or twice, also while programs compile"),
    "disks": Kind("disks", 3, "disks of 8 kB to 2 MB, which are full"),
    "damage": Kind("damage", 3, "damaged files of stopped runs, which are continued"),
    "fuzz": Kind("fuzz", 12, "damaged and crafted files for every reader"),
    "servers": Kind("servers", 1, "download servers that misbehave"),
    "absurd": Kind("absurd", 3, "settings that no one should give"),
    "replies": Kind("replies", 5, "hostile replies to a Flower server"),
    "calls": Kind("many", 1, "calls of `fedda.run` in one process"),
    "rounds": Kind("many", 1, "rounds of one run"),
}
