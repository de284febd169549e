"""MkDocs hook: write one page for each file of `fedda.algorithms`, and an index of them."""

import json
from pathlib import Path
from statistics import mean
from types import ModuleType
from typing import Any

import docstrings
import figure
import jax
import jax.numpy as jnp
from mkdocs.structure.files import File, Files

from fedda import algorithms
from fedda.algorithms import registry

DOCS = Path(__file__).parents[1]
RECORD = json.loads((DOCS / "digits/runs.json").read_text())
SYMBOLS = (
    "`W` is the server's model, `N_i` the number of examples of client i, and `g_i(w; batch)` the "
    "gradient at `w` of its mean loss over a mini-batch."
)


def on_config(config: Any) -> Any:
    """Add the pages to the section of the navigation that begins with the index."""
    for section in config.nav:
        for pages in section.values():
            if pages == ["algorithms/index.md"]:
                pages += [{title(module): path(module)} for module in registry.modules()]
                return config
    raise ValueError("mkdocs.yml has no section of algorithms/index.md alone.")


def on_files(files: Files, config: Any) -> Files:
    """Add the content of the pages."""
    files.append(File.generated(config, "algorithms/index.md", content=index()))
    for module in registry.modules():
        files.append(File.generated(config, path(module), content=page(module)))
    return files


def path(module: ModuleType) -> str:
    """Return the place of a module's page."""
    return f"algorithms/{module.__name__.rpartition('.')[2]}.md"


def title(module: ModuleType) -> str:
    """Return the name of a method: the docstring up to its reference."""
    return (module.__doc__ or "").partition(" (")[0]


def index() -> str:
    """Return the page that lists all algorithms."""
    rows = [
        f"| [`{name}`]({path(module).partition('/')[2]}) | {variant.label} | {variant.reference} "
        f"| {variant.summary} | {variant.down} / {variant.up} | {memory(name)} |"
        for module in registry.modules()
        for name, variant in module.variants.items()
    ]
    return (
        "# Algorithms\n\n"
        f"`fedda` has {len(rows)} algorithms in {len(registry.modules())} files, one file for each "
        "method. `fedda algorithms` prints this list, and `fedda algorithms NAME` one page.\n\n"
        "*Down / up* is the number of models that a client receives and sends in a round, with the "
        "default options. *Client keeps* is what a client stores between rounds.\n\n"
        "| name | method | reference | what it does | down / up | client keeps |\n"
        "|:--|:--|:--|:--|:--|:--|\n" + "\n".join(rows) + "\n\n"
        "To write one of your own, see [Your own algorithm](../own_algorithm.md).\n"
    )


def page(module: ModuleType) -> str:
    """Return the page of one method."""
    heading, _, body = (module.__doc__ or "").partition("\n")
    named, _, does = heading.partition("): ")
    reference = named.partition(" (")[2]
    return "\n\n".join(
        [
            f"# {title(module)}",
            f"{does[0].upper()}{does[1:]} *{reference}.*",
            costs(module),
            "## On the digits",
            curves(module),
            "## Equations",
            docstrings.inline(SYMBOLS),
            docstrings.markdown(body),
            "## Settings",
            settings(module),
            "## Checked by the tests",
            checked(module),
        ]
    )


def costs(module: ModuleType) -> str:
    rows = [
        f"| `{name}` | {variant.down} | {variant.up} | {len(algorithms.get(name).phases)} "
        f"| {memory(name)} |"
        for name, variant in module.variants.items()
    ]
    return (
        "| name | models down | up | exchanges | client keeps |\n"
        "|:--|--:|--:|--:|:--|\n" + "\n".join(rows)
    )


def memory(name: str) -> str:
    """Return what a client stores between rounds, counted on a model of 10,000 numbers."""
    algorithm, size = algorithms.get(name), 10_000
    kept = jax.eval_shape(algorithm.memory, algorithm.Hyper(), {"w": jnp.zeros(size)})
    numbers = sum(leaf.size for leaf in jax.tree.leaves(kept))
    models, rest = divmod(numbers, size)
    counted = [(models, "model"), (rest, "number")]
    return " and ".join(f"{n} {what}{'s' * (n > 1)}" for n, what in counted if n) or "nothing"


def curves(module: ModuleType) -> str:
    names = ["fedavg", *(name for name in module.variants if name != "fedavg")]
    means = {name: list(map(mean, zip(*RECORD["accuracy"][name], strict=True))) for name in names}
    drawn = figure.curves(RECORD["rounds"], means, muted="fedavg")
    return (
        f"{drawn}\n\nTest accuracy by round, mean of {len(RECORD['accuracy']['fedavg'])} seeds: "
        "100 clients, 10 in a round, 5 local steps, each algorithm with the rates of its preset "
        f"for this task. The command was `{RECORD['command']}`. The task is easy and all methods "
        "end close together: the figure shows that the method learns, not that it is better than "
        "another."
    )


def settings(module: ModuleType) -> str:
    parts = []
    for name, variant in module.variants.items():
        rows = [
            f"| `{setting.name}` | {setting.default} | {setting.may_be} "
            f"| {f'`{setting.condition}`' if setting.condition else ''} |"
            for setting in registry.described(name)
        ]
        parts.append(
            f"### {name}\n\n{variant.label} ({variant.reference}): {variant.summary}.\n\n"
            "| setting | default | may be | only with |\n|:--|:--|:--|:--|\n" + "\n".join(rows)
        )
    return "\n\n".join(parts)


def checked(module: ModuleType) -> str:
    items = [
        "A round equals a NumPy reference written line by line from the equations, in float64, "
        "with partial participation, unequal clients and short batches."
    ]
    for name, variant in module.variants.items():
        if variant.unbiased:
            items.append(
                f"`{name}` converges to the optimum of the federation's loss, however many local "
                "steps clients take."
            )
        else:
            items.append(
                f"`{name}` does not converge to that optimum if unequal clients take several local "
                "steps."
            )
    for reduction in getattr(module, "reductions", []):
        chosen = shown({**reduction.options, **reduction.hyper})
        other = shown(reduction.other_hyper)
        items.append(
            f"`{reduction.name}`{chosen} equals "
            + (
                f"`{reduction.other}`{other}."
                if reduction.other != reduction.name
                else f"itself{other}."
            )
        )
    return "\n".join(f"- {item}" for item in items)


def shown(values: Any) -> str:
    text = " ".join(
        f"{name}={value:g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in values.items()
    )
    return f" with `{text}`" if text else ""
