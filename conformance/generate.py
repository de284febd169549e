"""Write the vectors from the references: `python -m conformance.generate [FOLDER]`."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from conformance.cases import FAMILIES, cases, problem
from conformance.reader import FOLDER, read_problem
from conformance.references import REFERENCES, run


def plain(value: Any) -> Any:
    """Return arrays as lists, and NumPy's numbers as Python's."""
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    if isinstance(value, list):
        return [plain(part) for part in value]
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def formatted(value: Any, indent: str = "") -> str:
    """Return JSON with one line for each array of numbers. Python writes all digits of a float."""
    deeper = indent + " "
    if isinstance(value, dict) and any(isinstance(part, (dict, list)) for part in value.values()):
        parts = [f"{json.dumps(key)}: {formatted(part, deeper)}" for key, part in value.items()]
        return "{\n" + ",\n".join(deeper + part for part in parts) + f"\n{indent}}}"
    if isinstance(value, list) and any("{" in json.dumps(part) for part in value):
        parts = [formatted(part, deeper) for part in value]
        return "[\n" + ",\n".join(deeper + part for part in parts) + f"\n{indent}]"
    return json.dumps(value)


def vectors(algorithm: str) -> dict[str, Any]:
    """Return the content of an algorithm's file."""
    federation, found = read_problem(), []
    for case in cases(algorithm):
        states = run(
            REFERENCES[algorithm],
            federation.weights,
            federation.visits(case.schedule, case.reduction),
            clients=len(federation.clients),
            **case.options,
            **case.hyper,
        )
        found.append({**case._asdict(), "rounds": [plain(state) for state in states]})
    return {"algorithm": algorithm, "cases": found}


def main(folder: Path = FOLDER) -> None:
    (folder / "problem.json").write_text(formatted(problem()) + "\n")
    for algorithm in FAMILIES:
        (folder / f"{algorithm}.json").write_text(formatted(vectors(algorithm)) + "\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
