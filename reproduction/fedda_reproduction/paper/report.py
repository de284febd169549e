"""The pages of a results folder as web pages, with plots of the finished runs."""

import math
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from markdown_it import MarkdownIt

from fedda.reports import figures, html
from fedda.reports.figures import Line, Panel, metric_label
from fedda.reports.statistics import Curve
from fedda.storage.files import write_whole
from fedda_reproduction.paper import comparison
from fedda_reproduction.paper.cells import Cell
from fedda_reproduction.paper.experiments import FEDDA, METHOD_TABLES, TUNED, experiments
from fedda_reproduction.paper.methods import METHODS, OPTIMISER_NAMES, TASKS, label
from fedda_reproduction.paper.page import Filler

EARLY = 0.05  # the share of a training whose values may leave the plot
VARIED = {"figure5": "local iterations", "figure5-scaled": "local iterations", "figure6": "rounds"}
Values = dict[float, list[float]]  # of several seeds, by the horizontal axis


def write(folder: Path, directory: Path) -> list[Path]:
    """Write `results.html`, a page for each of `tables/*.md`, and their figures as PNG.

    A page is that of the folder with its places filled. A figure replaces each comment
    `<!-- figure: NAME -->`, if the experiment has something to draw.

    Returns:
        The paths of the files, `results.html` first.
    """
    filler = Filler(folder)
    files, written = list[Path](), list[Path]()
    directory.mkdir(parents=True, exist_ok=True)
    for source, page in filler.pages().items():
        title, _, text = page.removeprefix("# ").partition("\n")
        parts = []
        # Texts stand between the names of figures.
        for number, part in enumerate(re.split(r"<!-- figure: (.*?) -->", text)):
            rows = draw(part, filler.finished) if number % 2 else {}
            for name, panels in rows.items():
                files += figures.draw(panels, directory, name)
            parts.append({"html": "" if number % 2 else _html(part), "rows": rows.values()})
        target = directory / _renamed(source.relative_to(folder).as_posix())
        target.parent.mkdir(exist_ok=True)
        content = html.render("results.html", package=__package__, title=title, parts=parts)
        write_whole(target, content)
        written.append(target)
        for image in re.findall('<img src="([^":]*)"', content):
            (target.parent / image).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source.parent / image, target.parent / image)
    return written + files


def _renamed(path: str) -> str:
    """Return the path of a web page by that of its text: `README.md` is `results.html`."""
    return re.sub(r"README\.md", "results.html", path).replace(".md", ".html")


def _html(markdown: str) -> str:
    """Convert Markdown to HTML, with scrolling tables and headings that can be linked to."""
    text: str = MarkdownIt("commonmark").enable("table").render(re.sub("<!--.*?-->", "", markdown))
    text = re.sub(
        r'href="((?:tables/)?[\w-]+\.md|\.\./README\.md)',
        lambda match: f'href="{_renamed(match[1])}',
        text,
    )
    # Other pages of the repository are not part of the report.
    text = re.sub(r'<a href="[^"#:]*\.md[^"]*">(.*?)</a>', r"\1", text)
    text = re.sub("(<table>.*?</table>)", r"<div class='scroll'>\1</div>", text, flags=re.DOTALL)

    def heading(match: re.Match[str]) -> str:
        return f"<h2 id='{re.sub('[^a-z0-9]+', '-', match[1].lower())}'>{match[1]}</h2>"

    return re.sub(r"<h2>(.*?)</h2>", heading, text)


def draw(name: str, finished: Sequence[Cell]) -> dict[str, list[Panel]]:
    """Return the figures of an experiment, or `full-batches`, by name: panels side by side."""
    made = {}
    if name in METHOD_TABLES:
        made = {f"{name}-{key}": _training(name, finished, key) for key in ("metric", "train_loss")}
    elif name in VARIED or name == "full-batches":
        made = {name: _varied(name, finished) if name in VARIED else _full_batches(finished)}
    return {figure: panels for figure, panels in made.items() if panels}


def _training(name: str, finished: Sequence[Cell], key: str) -> list[Panel]:
    """Return the metric of all methods of a table by round, with a panel for each optimiser."""
    runs, panels = comparison.runs(name, finished), []
    for optimiser, column in comparison.optimiser_columns(name).items():
        ran = [algorithm for algorithm in column if algorithm in runs]
        lines = [_line(algorithm, _by_round(runs[algorithm], key)) for algorithm in ran]
        if lines:
            content = next(iter(runs.values()))[0].content
            higher = key == "metric" and content["higher_is_better"]
            panel = _panel(f"{name}-{key}-{optimiser}", OPTIMISER_NAMES[optimiser], lines, content)
            panel = panel._replace(y_range=_y_range([line.curve for line in lines], higher))
            panels.append(panel if key == "metric" else panel._replace(y_label=metric_label(key)))
    return panels


def _full_batches(finished: Sequence[Cell]) -> list[Panel]:
    """Return the last half of tuned runs of the best FedDA and the best other method, by task.

    Runs with full-batch rounds at the end have thick lines, those without have thin lines.
    """
    panels = []
    for task, name in TUNED.items():
        tuned, full = (comparison.runs(table, finished) for table in (name, f"recommended-{task}"))
        both = {algorithm: full[algorithm] for algorithm in full if algorithm in tuned}
        lines = []
        for best in filter(None, (comparison.best(both, ours) for ours in (True, False))):
            for seeds, end in ((full[best], ", full-batch rounds at the end"), (tuned[best], "")):
                half = seeds[0].config.rounds / 2
                late = {x: y for x, y in _by_round(seeds, "metric").items() if x >= half}
                lines.append(_line(best, late, end)._replace(thick=bool(end)))
        if len(lines) == 4:
            content = next(iter(both.values()))[0].content
            panels.append(_panel(f"full-batches-{task}", TASKS[task], lines, content))
    return panels


def _varied(name: str, finished: Sequence[Cell]) -> list[Panel]:
    """Return FedDA's results by a setting, with a panel for each task that has two points."""
    points: dict[str, dict[str, Values]] = {}
    content: dict[str, Any] = {}
    for entry, lists in comparison.variants(experiments()[name].entries, finished):
        if lists:
            seeds = max(lists, key=len)
            series = points.setdefault(entry.task, {algorithm: {} for algorithm in FEDDA})
            ends = [math.nan if (end := cell.mean(entry.at)) is None else end for cell in seeds]
            series[entry.algorithm][entry.at or entry.values["local_work"]] = ends
            content[entry.task] = seeds[0].content
    panels = []
    for task, series in points.items():
        if max(map(len, series.values())) > 1:
            lines = [
                Line(curve=_curve(label(algorithm), values), style=i)
                for i, (algorithm, values) in enumerate(series.items())
            ]
            panel = _panel(f"{name}-{task}", TASKS[task], lines, content[task])
            panels.append(panel._replace(x_label=VARIED[name], markers=True))
    return panels


def _panel(name: str, title: str, lines: Sequence[Line], content: dict[str, Any]) -> Panel:
    y_label = metric_label(content["metric"])
    return Panel(name=name, x_label="round", y_label=y_label, lines=lines, title=title)


def _line(algorithm: str, values: Values, ending: str = "") -> Line:
    method = algorithm.partition("-")[0]
    curve = _curve(f"{METHODS[method]}{ending}", values)
    return Line(curve=curve, style=list(METHODS).index(method), thick=method == "fedda")


def _curve(name: str, values: Values) -> Curve:
    over: dict[str, Any] = {"mean": np.mean, "low": np.min, "high": np.max}
    made = {key: [float(of(seeds)) for seeds in values.values()] for key, of in over.items()}
    return Curve(label=name, x=list(values), **made)


def _by_round(seeds: Sequence[Cell], key: str) -> Values:
    """Return the regular evaluations, without the additional ones of the last rounds."""
    values: Values = {}
    for cell in seeds:
        for row in cell.rows():
            if row["round"] % cell.config.eval_every == 0 or row["round"] == cell.config.rounds:
                value = row[cell.content["metric"] if key == "metric" else key]
                values.setdefault(row["round"], []).append(math.nan if value is None else value)
    return values


def _y_range(curves: Sequence[Curve], higher: bool) -> tuple[float, float] | None:
    """Return the range of the better half of the methods, without the beginning.

    Failed methods and the untrained model would need most of the axis.
    """
    ended = [curve for curve in curves if math.isfinite(curve.mean[-1])]
    ended.sort(key=lambda curve: curve.mean[-1], reverse=higher)
    late = [
        value
        for curve in ended[: math.ceil(len(curves) / 2)]
        for x, value in zip(curve.x, curve.mean, strict=True)
        if x >= EARLY * curve.x[-1] and math.isfinite(value)
    ]
    if not late or min(late) == max(late):
        return None
    room = 0.05 * (max(late) - min(late))
    return min(late) - room, max(late) + room
