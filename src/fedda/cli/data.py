"""The commands `fedda data ...`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.filesize import decimal

from fedda.cli.completion import dataset_names, task_names
from fedda.cli.terminal import interruptible, print_table, say
from fedda.errors import InputError, unknown, writing
from fedda.tasks import config

if TYPE_CHECKING:
    import numpy as np

    from fedda.data import datasets, store
    from fedda.data.federation import Shards
    from fedda.data.streaming import Feed
    from fedda.simulate.progress import Update
    from fedda.tasks import Problem

data_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="List, fetch, import, show and verify data sets.",
)

GROWS = "grows with the files"
FOLDER = "folder with the environment variable FEDDA_DATA"
SHOWN_CLIENTS = 2000  # of a federation that is too large to be read as a whole

Memory = Annotated[
    int | None,
    typer.Option(
        min=1, metavar="GB", help="The most memory for reading the files.", show_default=GROWS
    ),
]
Minutes = Annotated[
    int | None, typer.Option(min=1, help="The most time for reading the files.", show_default=GROWS)
]


@data_app.command("list")
def data_list() -> None:
    """List the tasks, and the data sets on this machine."""
    from fedda.data import datasets
    from fedda.data.catalogue import DATASETS

    described = [[name, config.about(name)["description"]] for name in config.tasks()]
    print_table([["task", "data"], *described], "lw")
    rows, notes = [["data set", "on this machine"]], []
    for name in datasets.names():
        found = datasets.look(name)
        where = found.origin.get("path", "")
        if found.problem:
            notes.append(f"{name} is stale and not read: {found.problem}.")
            state = f"stale, from {where}" if where else "stale"
        elif found.store is None:
            how = "fetch" if name in DATASETS and DATASETS[name].downloads else "import"
            state = f"no: fedda data {how} {name}"
        else:
            split = found.store.splits.get("train") or next(iter(found.store.splits.values()))
            size = sum(facts["bytes"] for facts in found.store.meta["files"].values())
            clients = f"{_clients(split)} clients" if split.num_clients > 1 else "undivided"
            state = f"{clients}, {split.num_examples:,} examples, {decimal(size)}"
            state += f", from {where}" if where else ""
        rows.append([name, state])
    print_table(rows, "lw")
    say(
        *notes,
        f"The data sets are kept in {datasets.root()}.",
        "Clients and examples are of the training split. A run divides undivided data.",
    )


@data_app.command("fetch")
@writing(FOLDER)
def data_fetch(
    name: Annotated[
        str,
        typer.Argument(help="A data set of `fedda data list`.", autocompletion=dataset_names),
    ],
    mirror: Annotated[
        str | None, typer.Option(metavar="URL", help="Download from this address.")
    ] = None,
    memory: Memory = None,
    minutes: Minutes = None,
) -> None:
    """Download a data set, check it and import it. Run it again to continue a download."""
    from fedda.data import datasets

    with interruptible(f"Continue with: fedda data fetch {name}"), _progress(name) as (track, tell):
        opened = datasets.fetch_dataset(name, mirror, track, tell, **_limits(memory, minutes))
    _print_store(name, opened)
    say(f"The downloads are kept in {datasets.downloads(name)}")


@data_app.command("import")
@writing(FOLDER)
def data_import(
    name: Annotated[
        str,
        typer.Argument(
            help="A known data set, or a name for your own table.", autocompletion=dataset_names
        ),
    ],
    path: Annotated[Path, typer.Argument(help="A file, a folder or an archive.")],
    client: Annotated[
        str | None,
        typer.Option(help="Your table: the column of the client.", show_default="client"),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(help="Your table: the column to predict.", show_default="label, in .npz y"),
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(help="Your table: columns to predict from.", show_default="all others, or x"),
    ] = None,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Your table: columns to leave out.", show_default="none"),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="Your table: whether labels are classes or numbers.",
            metavar="classes|numbers",
            show_default="numbers if they have fractions",
        ),
    ] = None,
    prepare: Annotated[
        bool,
        typer.Option(
            "--prepare/--no-prepare",
            help="Your table: standardise numbers, fill in missing values, one-hot text.",
        ),
    ] = True,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the old data set.")] = False,
    memory: Memory = None,
    minutes: Minutes = None,
) -> None:
    """Import a data set from files on this machine.

    For example: `fedda data import visits visits.csv --client hospital --label outcome`
    """
    from fedda.data import datasets
    from fedda.data.catalogue import DATASETS

    if name in config.tasks() and name not in DATASETS:
        raise InputError(
            f"{name} is a task that reads no files. Choose another name for your data."
        )
    chosen: dict[str, Any] = {"client": client, "label": label, "features": feature}
    chosen |= {"ignore": ignore, "target": target}
    given = {key: value for key, value in chosen.items() if value} | _limits(memory, minutes)
    given |= {} if prepare else {"prepare": False}
    with interruptible("Nothing was imported."), _progress(name) as (_, tell):
        opened = datasets.import_files(name, path, tell, replace, **given)
    _print_store(name, opened)


@data_app.command("verify")
def data_verify(
    name: Annotated[
        str | None,
        typer.Argument(
            help="One data set.", show_default="all that are here", autocompletion=dataset_names
        ),
    ] = None,
) -> None:
    """Check that no file of the data sets has changed since it was written."""
    from fedda.data import datasets, store

    wrong = []
    for checked in [name] if name else [n for n in datasets.names() if any(datasets.look(n)[:2])]:
        try:
            say(f"{checked}: {len(datasets.verify(checked))} files are as they were written")
        except store.Stale as stale:
            wrong.append(f"{checked}: {stale}. {datasets.repair(checked)}")
    if wrong:
        raise InputError("\n".join(wrong))


@data_app.command("show")
@writing("--picture")
def data_show(
    task: Annotated[
        str, typer.Argument(help="A task, or a data set of your own.", autocompletion=task_names)
    ],
    partition: Annotated[
        str | None,
        typer.Option(
            help="user, iid, dirichlet:ALPHA or pachinko[:ALPHA]", show_default="the task's"
        ),
    ] = None,
    clients: Annotated[
        int | None, typer.Option(min=1, help="The number of clients.", show_default="the task's")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the partition.")] = 0,
    picture: Annotated[
        Path | None,
        typer.Option(help="A PNG or PDF file to draw.", show_default="TASK-PARTITION.png here"),
    ] = None,
) -> None:
    """Print and draw a federation: sizes of clients, how their labels differ, some images.

    The figure is written to a file in the current folder, or to the file of --picture.
    """
    if picture is not None and picture.suffix not in (".png", ".pdf"):
        raise InputError(f"the picture must be a .png or .pdf file, got {picture}.")
    import numpy as np

    from fedda import tasks
    from fedda.data import datasets, statistics
    from fedda.reports import federation

    values: dict[str, Any] = {"task": task, "partition_seed": seed}
    if task not in config.tasks():
        if task not in datasets.names():
            raise unknown("task or data set", task, {*config.tasks(), *datasets.names()})
        values |= {"task": "own", "data": task, "model": "linear"}
    given = {"partition": partition, "clients": clients}
    resolved = config.resolve(values | {key: value for key, value in given.items() if value})
    problem = tasks.load(resolved)
    how = problem.data.get("partition", resolved.partition)
    path = picture or Path(f"{task}-{how.replace(':', '-')}.png")
    some = _some_clients(problem.shards)
    histogram = statistics.label_histogram(some, len(problem.labels)) if problem.labels else None
    title = f"{task}, {how}"
    print_table([["", ""], *_facts(problem, some, histogram)], title=title)
    if cap := resolved.options.get("cap"):
        say(f"Examples are counted up to cap={cap} a client.")
    if some is not problem.shards:
        say(f"The numbers about labels are of {len(some.count):,} clients drawn at random.")
    federation.draw(
        path,
        title,
        count=np.asarray(some.count),
        histogram=histogram,
        labels=problem.labels,
        images=_images(some),
    )
    say(f"Drawn in {path}")


def _limits(gigabytes: int | None, minutes: int | None) -> dict[str, Any]:
    return {"memory": gigabytes and gigabytes * 10**9, "seconds": minutes and 60.0 * minutes}


def _facts(problem: Problem, some: Shards, histogram: np.ndarray | None) -> list[list[str]]:
    """Return the sizes of all clients, and how the labels of some of them differ."""
    import numpy as np

    from fedda.data import statistics
    from fedda.data.federation import num_rows

    whole = statistics.describe(np.asarray(problem.shards.count), None)
    labels = statistics.describe(np.asarray(some.count), histogram)
    facts = {
        "clients": whole.clients,
        "examples": whole.examples,
        "examples of a client: fewest": whole.fewest,
        "examples of a client: median": whole.median,
        "examples of a client: most": whole.most,
        "test examples": num_rows(problem.test),
        "labels": len(problem.labels) or None,
        "distinct labels of a client": labels.distinct_labels,
        "entropy of all labels (bits)": labels.label_entropy,
        "entropy of a client's labels (bits)": labels.client_entropy,
    }
    return [
        [name, f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"]
        for name, value in facts.items()
        if value is not None
    ]


def _some_clients(shards: Shards | Feed) -> Shards:
    """Return all clients, or a sample of a federation that stays on disk."""
    import numpy as np

    from fedda.data.federation import Shards

    if isinstance(shards, Shards):
        return shards
    size = min(SHOWN_CLIENTS, shards.num_clients)
    drawn = np.random.default_rng(0).choice(shards.num_clients, size, replace=False)
    return shards.gather(np.sort(drawn), slots=size)


def _images(shards: Shards) -> list[np.ndarray]:
    """Return the first images of a few clients, if their examples are images."""
    import numpy as np

    from fedda.data.federation import Ragged
    from fedda.reports import federation

    shape: tuple[int, ...] = () if isinstance(shards.x, Ragged) else shards.x.shape
    if len(shape) != 3 and not (len(shape) == 4 and shape[3] in (1, 3)):
        return []
    filled = np.flatnonzero(np.asarray(shards.count))[: federation.SHEET[0]]
    counts = np.minimum(shards.count[filled], federation.SHEET[1])
    places = zip(shards.start[filled], counts, strict=True)
    return [np.asarray(shards.x[start : start + count]) for start, count in places]


def _clients(split: store.Split) -> str:
    return f"{split.num_clients:,}" if split.num_clients > 1 else "undivided"


def _print_store(name: str, opened: store.Store) -> None:
    from fedda.data.readers.table import stored_preparation

    rows = [["split", "clients", "examples"]]
    for split_name, split in opened.splits.items():
        rows.append([split_name, _clients(split), f"{split.num_examples:,}"])
    print_table(rows, title=name)
    prepared = stored_preparation(opened)
    say(*filter(None, [opened.meta["words"], "" if prepared is None else repr(prepared)]))


@contextmanager
def _progress(name: str) -> Iterator[tuple[datasets.Track, datasets.Tell]]:
    """Show the progress of downloads, and of an import from its first message on."""
    from fedda.simulate.progress import bars

    with bars(every=10) as add:
        importing = cache(lambda: add(name))
        yield (lambda file: _download_bar(add(file)), lambda message: importing()(0, None, message))


def _download_bar(update: Update) -> Callable[[int, int | None], None]:
    from fedda.simulate.progress import Speed

    speed = Speed()

    def progress(done: int, total: int | None) -> None:
        text, rate = decimal(done), speed(done)
        text += "" if total is None else f" of {decimal(total)}"
        text += "" if rate is None else f", {decimal(int(rate))}/s"
        update(done, total, text)

    return progress
