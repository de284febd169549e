"""What our results say of each claim of the paper that numbers can settle.

F1 to F4 and F13 are about mathematics: `fedda theory` measures them, and what it wrote into
`theory` beside the cells is read here. So is what `fedda bench` wrote into `bench.json`, as the
seconds of cells depend on what else the machine did. The rest is read off the cells alone.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedda.errors import InputError
from fedda.report.tables import markdown_table, markdown_text
from fedda.storage.files import read_json
from fedda.storage.schema import NUMBER_OR_NULL
from fedda_reproduction.paper import conduct, evidence, rivals
from fedda_reproduction.paper.cells import Cell, Cells
from fedda_reproduction.paper.experiments import FEDDA
from fedda_reproduction.paper.judging import FAILS, HOLDS, IN_PART, OPEN, Verdict

LITTLE = 1.25  # times FedAvg's round, where we say that it is little time
MEANING = (
    "F1 to F14 are what the paper claims, and what using it asks for. *Holds*: in all that was "
    "compared; *so far*: in all that was run, of more; *in part*: in some of it; *does not hold*: "
    "in none of it. Two methods are told apart by the 95 % interval of their difference over "
    "shared seeds; where there is one seed, if they differ by over 1 % of what they come to."
)


# What is read of the files of `fedda theory` and `fedda bench`.
THEORY_FILE = {
    "claims": [{"key": str, "claim": str, "verdict": str, "measured": str}],
    "date?": str,
    "device?": str,
    "commit?": str,
    "versions?": {...: str},
}
BENCH_FILE = {"device": str, "models": {...: {"fedda_to_fedavg?": NUMBER_OR_NULL}}}


class Beside(NamedTuple):
    """What other commands wrote beside the cells; None: they were not run."""

    theory: Mapping[str, Any] | None = None
    bench: Mapping[str, Any] | None = None


def verdicts(results: Cells, beside: Beside) -> list[Verdict]:
    """One for each claim, F1 to F14."""
    found = results.found
    return [
        *(_of_theory(name, claim, beside.theory) for name, claim in THEORY.items()),
        rivals.faster(found),
        rivals.best(found),
        rivals.stack_overflow(found),
        conduct.local_iterations(found),
        conduct.more_rounds(found),
        conduct.sensitivity(found),
        conduct.stabilisation(found),
        conduct.decoupling(found),
        _of_theory("F13", RATIOS, beside.theory),
        _cost(found, beside.bench),
    ]


def read_beside(folder: Path) -> Beside:
    theory, bench = folder / "theory" / "theory.json", folder / "bench.json"
    return Beside(
        _written_by("fedda theory", theory, THEORY_FILE),
        _written_by("fedda bench", bench, BENCH_FILE),
    )


def _written_by(command: str, path: Path, spec: Any) -> Mapping[str, Any] | None:
    if not path.exists():
        return None
    try:
        found: dict[str, Any] = read_json(path, spec)
    except ValueError as error:
        raise InputError(
            f"{path} is not what {command} writes: {error}. Delete it, or write it again."
        ) from error
    return found


def section(results: Cells, beside: Beside) -> str:
    """As Markdown: a table of one sentence a claim, and under it the numbers."""
    found = verdicts(results, beside)
    listed = markdown_table(
        [["", "the paper says", "verdict", "what we found"], *_cells(found)], "llll"
    )
    numbers = [
        f"- **{each.name}** {markdown_text(each.measured)}" for each in found if each.measured
    ]
    title = "## What becomes of the paper's claims"
    parts = [title, MEANING, listed, "The numbers behind these:", "\n".join(numbers)]
    return "\n\n".join(parts)


def _cells(found: Sequence[Verdict]) -> list[list[str]]:
    return [[each.name, each.claim, each.verdict, each.told] for each in found]


# ------------------------------------------------------------------------------------ from theory

THEORY = {
    "F1": "With one full-batch step and all clients, FedDA is the centralised optimiser.",
    "F2": "The mean of the decoupled momenta is the global momentum, exactly.",
    "F3": "Local momentum deviates exponentially with local steps t, decoupled momentum as t².",
    "F4": "Local deviations grow at the rate λ+ of its appendix.",
}
RATIOS = "In FedDA+Adam the entries of m̂ / √v̂ stay near ±1."


def _of_theory(name: str, claim: str, theory: Mapping[str, Any] | None) -> Verdict:
    """What `fedda theory` found; a claim of several parts holds if all of them do.

    Of a claim of one part, what was measured begins with the sentence to be told.
    """
    parts = [part for part in (theory or {}).get("claims", []) if part["key"].split()[:1] == [name]]
    if not parts:
        return Verdict(name, claim, OPEN, "Not measured yet.")
    holding = sum(part["verdict"] == HOLDS for part in parts)
    partly = any(part["verdict"] == IN_PART for part in parts)
    verdict = HOLDS if holding == len(parts) else IN_PART if holding or partly else FAILS
    if len(parts) == 1:
        told, _, numbers = (
            f"{part[:1].upper()}{part[1:]}" for part in parts[0]["measured"].partition("; ")
        )
        return Verdict(name, claim, verdict, f"{told}.", f"{numbers}." if numbers else "")
    by_verdict: dict[str, list[str]] = {}
    for part in parts:
        by_verdict.setdefault(part["verdict"], []).append(f"“{part['claim']}”")
    told = "; ".join(f"{kind}: {', '.join(claims)}" for kind, claims in by_verdict.items())
    numbers = ". ".join(f"{part['claim']}: {part['measured']}" for part in parts)
    return Verdict(name, claim, verdict, f"{told[0].upper()}{told[1:]}.", f"{numbers}.")


# --------------------------------------------------------------------------- from cells and bench


def _cost(found: Sequence[Cell], bench: Mapping[str, Any] | None) -> Verdict:
    claim = "FedDA costs a second model, down and up, and little time."
    sent = set()
    for name in ("table2", "table3"):
        for algorithm, cell in evidence.first_runs(name, found).items():
            if algorithm in FEDDA:
                content, config = cell.content, cell.config
                model = 4 * content["parameters"] * config.cohort * config.rounds
                sent.add(tuple(round(content[f"bytes_{way}"] / model, 2) for way in ("down", "up")))
    ratios = {
        model: case["fedda_to_fedavg"]
        for model, case in (bench or {}).get("models", {}).items()
        if case.get("fedda_to_fedavg") is not None
    }
    if not (sent and bench and ratios):
        return Verdict("F14", claim, OPEN, "Not run, or not timed by fedda bench.")
    models = " or ".join(f"{down:g} models down and {up:g} up" for down, up in sorted(sent))
    shown = ", ".join(f"{model} {ratio:.2f}" for model, ratio in ratios.items())
    little = max(ratios.values()) <= LITTLE and all(round(max(each), 1) == 2 for each in sent)
    return Verdict(
        "F14",
        claim,
        HOLDS if little else IN_PART,
        f"{models}, in float32; a round takes {shown} times FedAvg's (fedda bench, "
        f"{bench['device']}).",
    )
