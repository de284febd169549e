"""Names of the algorithms and of their settings, without importing JAX.

Reading them from the algorithms takes seconds, because it imports JAX. So they are stored in a file
in the user's cache, until the file of an algorithm changes. The command line needs them to refuse
wrong names and to complete words.
"""

import json
import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedda.errors import InputError, unknown_algorithm
from fedda.storage.files import write_whole

SOURCES = Path(__file__).parents[1] / "algorithms"


@lru_cache
def algorithms() -> dict[str, dict[str, Any]]:
    """Return the `label`, `summary`, `settings` (with defaults) and `options` of each algorithm."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path, stamp = Path(caches) / "fedda" / "names.json", _stamp()
    with suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["stamp"] == stamp:
            return dict(kept["algorithms"])
    known = _read()
    with suppress(OSError, InputError):  # without a cache, the names are read each time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"stamp": stamp, "algorithms": known}))
    return known


def check(name: str) -> None:
    """Raise an `InputError` if no algorithm has this name."""
    if name not in algorithms():
        raise unknown_algorithm(name, {key: about["label"] for key, about in algorithms().items()})


def _stamp() -> list[Any]:
    """Return the paths, sizes and times of the files of the algorithms."""
    files = [(path, path.stat()) for path in sorted(SOURCES.glob("*.py"))]
    return [[str(path), about.st_size, about.st_mtime_ns] for path, about in files]


def _read() -> dict[str, dict[str, Any]]:
    from fedda.algorithms import registry

    return {
        name: {
            "label": variant.label,
            "summary": variant.summary,
            "settings": registry.all_settings(name),
            "options": registry.options(name),
        }
        for name, variant in registry.variants().items()
    }
