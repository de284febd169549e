"""The algorithms in NumPy, written from the equations and independent of the library."""

from conformance.references import (
    climb,
    fedavg,
    fedda,
    fedlin,
    fedlocal,
    fedopt,
    mfl,
    mime,
    scaffold,
    stem,
)
from conformance.references.reference import Reference, State, run

MODULES = (climb, fedavg, fedda, fedlin, fedlocal, fedopt, mfl, mime, scaffold, stem)
REFERENCES: dict[str, Reference] = {
    name: reference for module in MODULES for name, reference in module.REFERENCES.items()
}

__all__ = ["MODULES", "REFERENCES", "Reference", "State", "run"]
