"""Federated optimisation in compiled JAX programs, tested against the equations."""

import importlib
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedda.public import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        """Import the library when a name is first used: `fedda --help` does not wait for JAX."""
        if find_spec(f"fedda.{name}") is not None:
            return importlib.import_module(f"fedda.{name}")
        try:
            return getattr(importlib.import_module("fedda.public"), name)
        except AttributeError:
            raise AttributeError(f"module 'fedda' has no attribute {name!r}") from None

    def __dir__() -> list[str]:
        return sorted({*globals(), *importlib.import_module("fedda.public").__all__})


__version__ = "0.2.0"
