"""The configuration of a run, from defaults, presets, a TOML file and `key=value` words.

The file of a task, `tasks/<task>.toml`, contains a description, defaults of its runs (`[run]`), and
settings that only this task has (`[settings]`). If published experiments prepared the same data in
different ways, there is one more table for each of these pipelines; the first is the default.
`presets/<task>-<model>.toml` contains tuned or published settings of each algorithm.
"""

import dataclasses
import hashlib
import tomllib
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedda.errors import LARGEST, InputError, is_finite, shown, unknown, unknown_setting
from fedda.storage.files import toml
from fedda.tasks import names

if TYPE_CHECKING:  # names are checked without JAX
    from fedda.core.algorithm import Algorithm
    from fedda.core.algorithm_file import Loaded

TASKS = Path(__file__).parent
PRESETS = TASKS / "presets"
LONGEST = 255  # characters of a text, the longest name of a file


@dataclass(frozen=True)
class Config:
    """All settings of a run."""

    algorithm: str = "fedda-sgdm"
    task: str = "digits"
    model: str = "mlp"
    precision: str = "tf32"  # of products; see `models.PRECISIONS`
    partition: str = "dirichlet:0.3"
    partition_seed: int = 0  # independent of `seed`, so that seeds share one federation
    clients: int = 100  # 0: as many as the data set has
    cohort: int = 10
    sampling: str = "uniform"
    rounds: int = 200
    batch: int = 10
    local_work: int = 5
    local_unit: str = "steps"
    stabilise: float = 0.0  # full-batch rounds at the end: a share (below 1) or a number of rounds
    eval_every: int = 10
    late_every: int = 0  # interval of evaluations in the last 100 rounds; 0: `eval_every`
    checkpoint_every: int = 5  # evaluations between checkpoints
    seed: int = 0
    chunk: int = 0  # clients that are trained together; 0: chosen for the device
    devices: int = 0  # devices that train a cohort; 0: as many as are useful
    memory_gb: float = 4.0  # limit of client memory on the device; if larger, it stays on the host
    data_gb: float = 8.0  # limit of examples on the device; if larger, they stay on the host
    per_client: bool = False  # evaluate every client after the last round
    options: Mapping[str, Any] = field(default_factory=dict)  # settings of the task
    chosen: Mapping[str, Any] = field(default_factory=dict)  # settings of the algorithm
    source: Mapping[str, str] = field(default_factory=dict)  # the file of a user's algorithm

    @property
    def method(self) -> "str | Algorithm":
        """The name of a known algorithm, or the record that a file defines."""
        return self.loaded().algorithm if self.source else self.algorithm

    def loaded(self) -> "Loaded":
        """Return the content of the file that defines the algorithm."""
        from fedda.core.algorithm_file import load

        return load(Path(self.source["algorithm_file"]), self.source["algorithm_sha256"])

    def flat(self) -> dict[str, Any]:
        """Return all settings in one dictionary, as in a file."""
        values = {name: getattr(self, name) for name in FIELDS}
        return values | dict(self.source) | dict(self.options) | dict(self.chosen)


KINDS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "true or false"),
    str: (str, "text"),
    int: (int, "a whole number"),
    float: ((int, float), "a number"),
}
# The settings of every run, with their types. Tasks and algorithms have more settings.
FIELDS = {own.name: own.type for own in dataclasses.fields(Config) if own.type in KINDS}

# The least values of settings. Others are checked when a run is prepared.
_LEAST = dict.fromkeys(
    ("rounds", "cohort", "batch", "local_work", "eval_every", "checkpoint_every"), 1
) | dict.fromkeys(
    ("seed", "partition_seed", "late_every", "chunk", "clients", "devices", "data_gb"), 0
)


def resolve(values: Mapping[str, Any]) -> Config:
    """Return a complete configuration.

    Args:
        values: Settings of the run, the task and the algorithm. Missing settings are taken from
            the preset of the task, model and algorithm, then from the task, then from the defaults
            of `Config`. `algorithm` may be the path of a Python file that defines one
            `fedda.Algorithm`.

    Raises:
        InputError: A name is unknown, a value has the wrong type or size, or the file of an
            algorithm has changed.
    """
    base, tuned, further = _checked(values)
    from fedda import algorithms

    known = algorithms.settings(base.method, further)  # under the chosen options
    if base.source:
        _check_known(base, further, known)
    settings = {name: value for name, value in tuned.items() if name in known} | further
    _, hyper = algorithms.configure(base.method, settings)
    choices = algorithms.options(base.method)
    chosen = {name: settings.get(name, allowed[0]) for name, allowed in choices.items()}
    return dataclasses.replace(base, chosen=chosen | hyper._asdict())


def check_names(values: Mapping[str, Any]) -> None:
    """Check names and types as `resolve` does, but without importing JAX, which is slow."""
    _checked(values)


def _checked(values: Mapping[str, Any]) -> tuple[Config, dict[str, Any], dict[str, Any]]:
    """Return a configuration, the algorithm's preset, and the given settings of the algorithm."""
    values = with_file(values)
    source = {name: values.pop(name) for name in SOURCE if name in values}
    given = {name: value for name, value in values.items() if name in FIELDS}
    for name, value in given.items():
        _check_kind(name, value, FIELDS[name])
        if value < _LEAST.get(name, value):
            raise InputError(f"{name} must be at least {_LEAST[name]}, got {value}.")
    task = given.get("task", Config.task)
    base = Config(**about(task).get("run", {}) | given)
    tuned = preset(base.task, base.model).get(base.algorithm, {})
    of_run = {name: value for name, value in tuned.items() if name in FIELDS}
    options = _options(task, values)
    base = dataclasses.replace(base, **of_run | given, options=options, source=source)
    further = {
        name: value for name, value in values.items() if name not in FIELDS and name not in options
    }
    if not source:
        names.check(base.algorithm)
        _check_known(base, further, names.algorithms()[base.algorithm]["settings"])
    return base, tuned, further


def _check_known(base: Config, further: Iterable[str], known: Iterable[str]) -> None:
    for name in further:
        if name not in known:
            here = f"{base.algorithm} on {base.task} has no"
            raise setting_error(name, here, (*FIELDS, *base.options, *known))


SOURCE = ("algorithm_file", "algorithm_sha256")  # the settings of a user's algorithm


def with_file(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings. A path as `algorithm` becomes a name, a path and a checksum."""
    source = _source(values)
    others = {name: value for name, value in values.items() if name not in SOURCE}
    return others | source | ({"algorithm": Path(source[SOURCE[0]]).stem} if source else {})


def _source(values: Mapping[str, Any]) -> dict[str, str]:
    """Return the file of a user's algorithm and its checksum; empty for a known algorithm."""
    name, kept = values.get("algorithm"), values.get("algorithm_file")
    if isinstance(name, str) and name.endswith(".py"):
        kept, before = name, None
    elif isinstance(kept, str) and Path(kept).stem == name:
        before = values.get("algorithm_sha256")
    else:
        return {}
    path = Path(kept).expanduser().absolute()
    try:
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise InputError(
            f"cannot read the algorithm in {path} ({error.strerror}). Expected a Python file that "
            "defines one fedda.Algorithm: give the path of one."
        ) from None
    if before not in (None, sha256):
        raise InputError(
            f"{path} has changed since the run began: its SHA-256 is {sha256[:12]}, expected "
            f"{str(before)[:12]}. Restore the file, or start a new run in another directory."
        )
    if path.stem in names.algorithms():
        raise InputError(
            f"{path} has the name of a known algorithm, {path.stem}. Results have the name of the "
            "file: rename it."
        )
    _check_kind("algorithm_file", str(path), str)
    return {"algorithm_file": str(path), "algorithm_sha256": sha256}


def setting_error(name: str, here: str, known: Iterable[str]) -> InputError:
    """Return the error for an unknown setting. It names the algorithms that have this setting."""
    owners = owners_of(name)
    if not owners:
        return unknown_setting("setting", name, known)
    more = f" and {len(owners) - 4} more" if len(owners) > 4 else ""
    return InputError(f"{here} setting {name!r}. It is a setting of {', '.join(owners[:4])}{more}.")


def owners_of(setting: str) -> list[str]:
    """Return the algorithms and tasks that have a setting."""
    found = [name for name, about in names.algorithms().items() if setting in about["settings"]]
    return found + [task for task in tasks() if setting in task_settings(task)]


@lru_cache
def about(task: str) -> dict[str, Any]:
    """Return the content of a task's file."""
    if task not in tasks():
        from fedda.data import datasets

        if task in datasets.names():
            raise InputError(f"unknown task {task!r}. It is a data set: write task=own data={task}")
        raise unknown("task", task, tasks())
    return tomllib.loads((TASKS / f"{task}.toml").read_text(encoding="utf-8"))


def tasks() -> list[str]:
    """Return the names of all tasks."""
    return sorted(path.stem for path in TASKS.glob("*.toml"))


def task_settings(task: str) -> set[str]:
    """Return the names of the settings that only this task has."""
    return set(_options(task, {}))


def _options(task: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a task: the given values, or the defaults of its pipeline."""
    file = about(task)
    pipelines = {
        name: table
        for name, table in file.items()
        if name not in ("description", "run", "settings")
    }
    defaults = dict(file.get("settings", {}))
    if pipelines:
        pipeline = values.get("pipeline", next(iter(pipelines)))
        _check_kind("pipeline", pipeline, str)
        if pipeline not in pipelines:
            raise unknown(f"pipeline of {task}", pipeline, pipelines)
        defaults |= {"pipeline": pipeline} | pipelines[pipeline]
    for name, default in defaults.items():
        if name in values:
            _check_kind(name, values[name], type(default))
    return {name: values.get(name, default) for name, default in defaults.items()}


def _check_kind(name: str, value: Any, kind: Any) -> None:
    allowed, words = KINDS[kind]
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, allowed):
        raise InputError(f"{name} must be {words}, got {shown(value)}.")
    # Accepted values are written to config.toml, where a resumed run must read the same values.
    if kind is str and (len(value) > LONGEST or any(map(_is_control, value))):
        raise InputError(
            f"{name} must be text of at most {LONGEST} characters, without control characters, "
            f"got {shown(value)}."
        )
    if kind is int and abs(value) > LARGEST:
        raise InputError(
            f"{name} must be a whole number of less than 2**31 in size, got {shown(value)}."
        )
    if kind is float and not is_finite(value):
        raise InputError(f"{name} must be a finite number, got {shown(value)}.")


def _is_control(character: str) -> bool:
    """Return whether TOML must escape a character, or cannot hold it (an unpaired surrogate)."""
    return unicodedata.category(character) in ("Cc", "Cs")


@lru_cache
def preset(task: str, model: str) -> dict[str, dict[str, Any]]:
    """Return the tuned or published settings of each algorithm on a task and model."""
    name = f"{task}-{model}.toml"
    if name not in {path.name for path in PRESETS.glob("*.toml")}:  # `model` may be any text
        return {}
    return tomllib.loads((PRESETS / name).read_text(encoding="utf-8"))


def read(path: Path) -> dict[str, Any]:
    """Return the keys and values of a configuration file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"there is no configuration file {path}.") from None
    except OSError as error:
        raise InputError(f"cannot read the configuration file {path} ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid TOML: {error}.") from None


def parse(settings: Iterable[str]) -> dict[str, Any]:
    """Return the values of `key=value` words. A value that is not TOML is text."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals or not key:
            raise InputError(f"a setting must look like key=value, got {shown(setting)}.")
        try:
            found = tomllib.loads(f"value = {text}")
        except (ValueError, RecursionError):  # also for thousands of digits or brackets
            found = {}
        # A text with a line break could contain more keys.
        values[key] = found["value"] if found.keys() == {"value"} else text
    return values


def from_words(words: list[str]) -> dict[str, Any]:
    """Return the settings of a command line: those of a file, overridden by `key=value` words."""
    files = [word for word in words if "=" not in word]
    if len(files) > 1 or (files and not files[0].endswith(".toml")):
        files_of_code = [word for word in files if word.endswith(".py")]
        known = {"task": tasks(), "algorithm": [*names.algorithms(), *files_of_code]}
        meant = [f"{key}={word}" for word in files for key in known if word in known[key]]
        hint = f" Did you mean {' '.join(meant)}?" if meant else ""
        raise InputError(
            "expected one CONFIG.toml at most and settings key=value, "
            f"got {' '.join(files)!r}.{hint}"
        )
    values = read(Path(files[0])) if files else {}
    return values | parse(word for word in words if "=" in word)


def dump(config: Config) -> str:
    """Return the configuration as TOML.

    Raises:
        InputError: Reading the text back would give another configuration, so a run with it could
            not be resumed.
    """
    return toml(config.flat())
