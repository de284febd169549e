"""What a run is: one flat set of keys, from defaults, presets, a TOML file and `key=value`."""

import dataclasses
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedda import algorithms
from fedda.errors import InputError, unknown

PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True)
class Config:
    """Everything that decides a run's numbers; `chosen` holds the algorithm's own settings."""

    algorithm: str = "fedda-sgdm"
    task: str = "digits"
    model: str = "mlp"
    partition: str = "dirichlet:0.3"
    partition_seed: int = 0  # apart from `seed`, so that seeds share one federation
    clients: int = 100
    cohort: int = 10
    rounds: int = 200
    batch: int = 10
    local_work: int = 5
    local_unit: str = "steps"
    stabilise: float = 0.0  # full-batch rounds at the end: a share below 1, or a number
    eval_every: int = 10
    checkpoint_every: int = 5  # evaluations
    seed: int = 0
    chunk: int = 0  # clients worked on together; 0: the whole cohort
    devices: int = 1
    memory_gb: float = (
        4.0  # on the device, for what clients keep; beyond it they keep it on the host
    )
    chosen: Mapping[str, Any] = field(default_factory=dict)

    def flat(self) -> dict[str, Any]:
        """All keys and values on one level, as a file holds them."""
        values = {name: getattr(self, name) for name in FIELDS}
        return values | dict(self.chosen)


FIELDS = {each.name: each.type for each in dataclasses.fields(Config) if each.name != "chosen"}

KINDS: dict[Any, tuple[Any, str]] = {
    str: (str, "text"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
}


def resolve(values: Mapping[str, Any]) -> Config:
    """A whole configuration: what is not given comes from the task's preset, then the defaults."""
    given = {name: value for name, value in values.items() if name in FIELDS}
    for name, value in given.items():
        kind, words = KINDS[FIELDS[name]]
        if isinstance(value, bool) or not isinstance(value, kind):
            raise InputError(f"{name} must be {words}, got {value!r}.")
    for name, least in (("seed", 0), ("partition_seed", 0), ("checkpoint_every", 1), ("chunk", 0)):
        if given.get(name, least) < least:
            raise InputError(f"{name} must be at least {least}, got {given[name]}.")
    base = Config(**given)
    own = {name: value for name, value in values.items() if name not in FIELDS}
    known = algorithms.settings(base.algorithm, own)
    for name in own:
        if name not in known:
            raise unknown(f"setting of {base.algorithm}", name, (*FIELDS, *known))
    tuned = preset(base.task, base.model).get(base.algorithm, {})
    own = {name: value for name, value in tuned.items() if name in known} | own
    _, hyper = algorithms.configure(base.algorithm, own)
    options = algorithms.options(base.algorithm)
    chosen = {name: own.get(name, choices[0]) for name, choices in options.items()}
    return dataclasses.replace(base, chosen=chosen | hyper._asdict())


def preset(task: str, model: str) -> dict[str, dict[str, Any]]:
    """The settings that each algorithm has on a task and model, where somebody has tuned them."""
    path = PRESETS / f"{task}-{model}.toml"
    return tomllib.loads(path.read_text()) if path.exists() else {}


def read(path: Path) -> dict[str, Any]:
    """The keys and values of a configuration file."""
    try:
        return tomllib.loads(path.read_text())
    except OSError:
        raise InputError(f"there is no configuration file {path}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not valid TOML: {error}.") from None


def parse(settings: Iterable[str]) -> dict[str, Any]:
    """The values of `key=value` words; a value is TOML, or else text."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise InputError(f"a setting must look like key=value, got {setting!r}.")
        try:
            values[key] = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            values[key] = text
    return values


def dump(config: Config) -> str:
    """The configuration as TOML; numbers and text on one level are written there as in JSON."""
    return "".join(f"{name} = {json.dumps(value)}\n" for name, value in config.flat().items())
