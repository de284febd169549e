"""What was measured as Markdown. Standard library only."""

import statistics
from typing import Any

TITLES = {
    "emnist": "EMNIST CNN (1,206,590 parameters)",
    "digits": "Digits perceptron 64-64-10",
    "resnet": "ResNet-18 (11,227,812 parameters), 24x24",
    "emnist-unequal": "EMNIST CNN, clients with the sizes of FEMNIST's writers",
    "digits-unequal": "Digits perceptron, clients with log-normal sizes (sigma 1)",
}


def allowed(row: dict[str, Any], precision: str) -> float:
    """How far a peer's weights may be from fedda's, as a share of how far they moved."""
    if precision == "bf16":
        return 0.1  # it has eight bits
    return 1e-3 if "cpu" in row["device"].lower() else 2e-2  # TF32


def verdict(row: dict[str, Any], settings: dict[str, Any]) -> str:
    if not row["after"] < row["before"]:
        return "WRONG: the loss did not fall"
    if row["deviation"] is None:
        return "-"
    if row["script"] == "peer_fedjax.py" and settings["sizes"] != "equal":
        return f"{row['deviation']:.0e}: it fills a client's last batch from another epoch"
    far = row["deviation"] > allowed(row, settings["precision"])
    return f"{'WRONG: ' if far else ''}{row['deviation']:.0e}"


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def table(task: str, result: dict[str, Any]) -> str:
    settings, rows = result["settings"], result["peers"]
    medians = {
        name: statistics.median(row["seconds"]) for name, row in rows.items() if row["seconds"]
    }
    ours = [name for name in medians if rows[name]["script"] == "peer_fedda.py"]
    best = min(ours or medians, key=lambda name: medians[name])
    worked = len(next(iter(rows.values()))["seconds"])
    steps = f"{settings['steps']} steps" if settings["sizes"] == "equal" else "one epoch in steps"
    lines = [
        f"### {TITLES[task]}",
        "",
        f"{settings['algorithm']}, {settings['clients']} clients, cohort {settings['cohort']}, "
        f"{steps} of {settings['batch']}, {settings['precision']}; medians of {worked} turns. "
        f"Ratios are to `{best}`.",
        "",
        "| | time per round | from - to | ratio | core seconds per round | the first two rounds "
        "| weights differ by | cores used while it waits |",
        "|:--|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for name in sorted(rows, key=lambda name: medians.get(name, float("inf"))):
        row = rows[name]
        if name not in medians:
            lines.append(f"| {name} | not measured: {row.get('error', '')} | | | | | | |")
            continue
        idle = f"{statistics.mean(row['idle']):.2f}" if row["idle"] else ""
        cells = [
            duration(medians[name]),
            f"{duration(min(row['seconds']))} - {duration(max(row['seconds']))}",
            f"{medians[name] / medians[best]:.2f}",
            duration(statistics.median(row["spent"])) if row["spent"] else "",
            duration(row["first"]),
            verdict(row, settings),
            idle,
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    foreign = [share for row in rows.values() for share in row["foreign"]]
    if foreign:
        average = max(0, statistics.mean(foreign))  # a difference, which may be below 0
        lines += [
            "",
            f"Other programs used {average:.2f} cores on average during a turn, "
            f"{max(foreign):.2f} at most.",
        ]
    return "\n".join(lines)


def report(results: dict[str, Any]) -> str:
    versions: dict[str, str] = {}
    for result in results["tasks"].values():
        for name, row in result["peers"].items():
            if "versions" in row:
                packages = ", ".join(f"{key} {value}" for key, value in row["versions"].items())
                versions[name] = f"{packages}; {row['device']}"
    where = results["machine"]
    head = (
        f"{results['date']}, {where['cores']} cores ({where['processor']}), {where['system']}.\n"
        f"`{results['command']}`"
    )
    tail = "\n".join(f"- {name}: {text}" for name, text in versions.items())
    parts = [table(task, result) for task, result in results["tasks"].items()]
    return "\n\n".join([head, *parts, tail]) + "\n"
