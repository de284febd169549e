"""The commands `fedda data ...`."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.filesize import decimal
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column, Table

from fedda import tasks
from fedda.cli.terminal import err, interruptible, out
from fedda.data import datasets, statistics, store
from fedda.data.catalogue import DATASETS
from fedda.data.federation import Ragged, Shards, num_rows
from fedda.data.streaming import Feed
from fedda.errors import InputError, MissingExtraError, unknown, writing
from fedda.report import federation
from fedda.tasks import config

data_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Data sets and how they are split over clients.",
)

SHOWN_CLIENTS = 2000  # of a federation that is too large to be looked at whole
PLAIN_SECONDS = 10.0  # between two lines of progress where there is no terminal

Name = Annotated[str, typer.Argument(help="A data set of `fedda data list`.")]
Memory = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1_000_000,
        metavar="GB",
        help="The most memory that reading the files may take.",
        show_default="2 GB, or 50 times the size of the files if the machine has it",
    ),
]
Minutes = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1_000_000,
        help="The most time that reading the files may take.",
        show_default="2 minutes, and 20 seconds more for each MB of the files",
    ),
]


@data_app.command("list")
def data_list() -> None:
    """List the tasks, and the data sets on this machine."""
    listing = Table(box=box.SIMPLE)
    listing.add_column("task", no_wrap=True)
    listing.add_column("data")
    for name in config.tasks():
        listing.add_row(name, _text(config.about(name)["description"]))
    out.print(listing)
    listing = Table(box=box.SIMPLE)
    listing.add_column("data set", no_wrap=True)
    for column in ("clients", "examples", "on disk"):
        listing.add_column(column, justify="right", no_wrap=True)
    listing.add_column("state")
    listing.add_column("from", overflow="fold")
    left = "is of an import that still runs, or was killed: then the next import removes it."
    notes = [f"{path} {left}" for path in datasets.leftovers()]
    for name in datasets.names():
        found = datasets.look(name)
        numbers, state = ("", "", ""), "stale" if found.problem else "not here"
        if found.store is not None:
            numbers, state = _numbers(found.store), "ready"
        if found.problem:
            notes.append(f"{name} is stale and not read: {found.problem}.")
        how = "fetch" if name in DATASETS and DATASETS[name].downloads else "import"
        where = found.origin.get("path", f"fedda data {how} {name}")
        listing.add_row(name, *numbers, state, _text(where))
    out.print(listing)
    told = "clients and examples are those to train on, undivided ones are split as a run says"
    for line in (*notes, f"Kept in {datasets.root()}; {told}."):
        out.print(_text(line), soft_wrap=True)


@data_app.command("fetch")
def data_fetch(
    name: Name,
    mirror: Annotated[
        str | None,
        typer.Option(help="Another address below which the same files are.", metavar="URL"),
    ] = None,
    memory: Memory = None,
    minutes: Minutes = None,
) -> None:
    """Download a data set, check it and import it. Done again, it goes on where it was cut off."""
    with _reporting() as (track, tell), interruptible(f"Continue with: fedda data fetch {name}"):
        opened = datasets.fetch_dataset(name, mirror, track, tell, **_limits(memory, minutes))
    _print_store(name, opened)
    out.print(_text(f"The files downloaded are kept in {datasets.downloads(name)}"), soft_wrap=True)


@data_app.command("import")
def data_import(
    name: Annotated[str, typer.Argument(help="A known data set, or a name for your own.")],
    path: Annotated[Path, typer.Argument(help="A file, a folder or an archive.")],
    client: Annotated[
        str | None,
        typer.Option(help="Your own: the column of the client.", show_default="client"),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option(help="Your own: the column to predict.", show_default="label, in .npz y"),
    ] = None,
    feature: Annotated[
        list[str] | None,
        typer.Option(
            help="Your own: a column to predict from. May be given more than once.",
            show_default="all other numbers, in .npz x",
        ),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Instead of one of this name from other files.")
    ] = False,
    memory: Memory = None,
    minutes: Minutes = None,
) -> None:
    """Make a data set from files that are here already."""
    options: dict[str, Any] = {"client": client, "label": label, "features": feature}
    given = {key: value for key, value in options.items() if value} | _limits(memory, minutes)
    with _reporting() as (_, tell), interruptible("Nothing was imported."):
        before = datasets.look(name).origin
        opened = datasets.import_files(name, path, tell, replace, **given)
    _print_store(name, opened)
    after = opened.meta["origin"]
    if before and any(before.get(key) != after[key] for key in ("path", "options")):
        words = " ".join(["", *datasets.option_words(before)])
        told = f"It replaced {name} from {before.get('path', 'elsewhere')}"
        out.print(_text(f"{told}{words}"), soft_wrap=True)


@data_app.command("verify")
def data_verify(
    name: Annotated[
        str | None, typer.Argument(help="One data set.", show_default="all that are here")
    ] = None,
) -> None:
    """Read every byte of the data sets and compare it with what was written."""
    here = [each for each in datasets.names() if any(datasets.look(each)[:2])]
    wrong = []
    for each in here if name is None else [name]:
        try:
            files = datasets.verify(each)
            out.print(f"{each}: {len(files)} files are as they were written")
        except store.Stale as stale:
            wrong.append(f"{each}: {stale}. {datasets.repair(each)}")
    if wrong:
        raise InputError("\n".join(wrong))


@data_app.command("show")
@writing("--picture")
def data_show(
    task: Annotated[str, typer.Argument(help="A task, or a data set of your own.")],
    partition: Annotated[
        str | None,
        typer.Option(
            help="user, iid, dirichlet:ALPHA or pachinko[:ALPHA]", show_default="the task's"
        ),
    ] = None,
    clients: Annotated[int | None, typer.Option(min=1, show_default="the task's")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the partition.")] = 0,
    picture: Annotated[
        Path | None,
        typer.Option(
            help="Where to draw it: a PNG or PDF file.",
            show_default="TASK-PARTITION.png in the current folder",
        ),
    ] = None,
) -> None:
    """Print and draw a federation: its clients' sizes, how their labels differ, some images.

    The drawing goes into a file in the current folder, or the one that --picture names.
    """
    chosen: dict[str, Any] = {"task": task, "partition_seed": seed}
    if task not in config.tasks():
        if task not in datasets.names():
            raise unknown("task or data set", task, {*config.tasks(), *datasets.names()})
        chosen |= {"task": "own", "data": task, "model": "linear"}
    chosen |= {} if partition is None else {"partition": partition}
    chosen |= {} if clients is None else {"clients": clients}
    resolved = config.resolve(chosen)
    if picture is not None and picture.suffix not in (".png", ".pdf"):
        raise InputError(f"the picture must be a .png or .pdf file, got {picture}.")
    problem = tasks.load(resolved)
    how = problem.data.get("partition", resolved.partition)
    path = picture or Path(f"{task}-{how.replace(':', '-')}.png")
    some = _some_clients(problem.shards)
    histogram = statistics.label_histogram(some, len(problem.labels)) if problem.labels else None
    title = f"{task}, {how}"
    listing = Table(box=box.SIMPLE, title=_text(title), show_header=False, title_justify="left")
    listing.add_column()
    listing.add_column(justify="right")
    for name, value in _facts(problem, some, histogram).items():
        listing.add_row(name, value)
    out.print(listing)
    if cap := resolved.options.get("cap"):
        out.print(f"Examples are counted up to cap={cap} a client.")
    if some is not problem.shards:
        out.print(f"What is said of labels is of {len(some.count):,} clients drawn at random.")
    try:
        federation.draw(
            path,
            title,
            count=np.asarray(some.count),
            histogram=histogram,
            labels=problem.labels,
            images=_images(some),
        )
        out.print(f"Drawn in {path}")
    except MissingExtraError as error:
        err.print(_text(str(error)))


def _limits(memory: int | None, minutes: int | None) -> dict[str, Any]:
    return {
        "memory": None if memory is None else memory * 10**9,
        "seconds": None if minutes is None else minutes * 60.0,
    }


def _facts(problem: tasks.Problem, some: Shards, histogram: np.ndarray | None) -> dict[str, str]:
    """The sizes of all clients, and how the labels of some of them differ."""
    whole = statistics.describe(np.asarray(problem.shards.count), None)
    lines = {
        "clients": f"{whole.clients:,}",
        "examples": f"{whole.examples:,}",
        "of a client: fewest": f"{whole.fewest:,}",
        "of a client: median": f"{whole.median:,.5g}",
        "of a client: most": f"{whole.most:,}",
        "test examples": f"{num_rows(problem.test):,}",
    }
    if histogram is not None:
        about = statistics.describe(np.asarray(some.count), histogram)
        lines |= {
            "labels": f"{histogram.shape[1]}",
            "distinct labels of a client": f"{about.distinct_labels:.1f}",
            "entropy of all labels": f"{about.label_entropy:.2f} bits",
            "entropy of a client's labels": f"{about.client_entropy:.2f} bits",
        }
    return lines


def _some_clients(shards: Shards | Feed) -> Shards:
    """All clients or, of a federation that stays on disk, enough to know what it is like."""
    if isinstance(shards, Shards):
        return shards
    size = min(SHOWN_CLIENTS, shards.num_clients)
    drawn = np.random.default_rng(0).choice(shards.num_clients, size, replace=False)
    return shards.gather(np.sort(drawn), slots=size)


def _images(shards: Shards) -> list[np.ndarray]:
    """Return the first images of a few clients, if their examples are images."""
    if isinstance(shards.x, Ragged) or not (
        shards.x.ndim == 3 or (shards.x.ndim == 4 and shards.x.shape[3] in (1, 3))
    ):
        return []
    clients, images = federation.SHEET
    filled = np.flatnonzero(np.asarray(shards.count))[:clients]
    starts, counts = shards.start[filled], np.minimum(shards.count[filled], images)
    return [
        np.asarray(shards.x[start : start + count])
        for start, count in zip(starts, counts, strict=True)
    ]


def _numbers(opened: store.Store) -> tuple[str, str, str]:
    """Clients and examples of the split for training, and bytes on disk."""
    split = opened.splits.get("train") or next(iter(opened.splits.values()))
    size = sum(facts["bytes"] for facts in opened.meta["files"].values())
    return _clients(split), f"{split.num_examples:,}", decimal(size)


def _clients(split: store.Split) -> str:
    return f"{split.num_clients:,}" if split.num_clients > 1 else "undivided"


def _print_store(name: str, opened: store.Store) -> None:
    listing = Table(box=box.SIMPLE, title=_text(name), title_justify="left")
    for column in ("split", "clients", "examples"):
        listing.add_column(column, justify="left" if column == "split" else "right")
    for each, split in opened.splits.items():
        listing.add_row(_text(each), _clients(split), f"{split.num_examples:,}")
    out.print(listing)
    if words := opened.meta["words"]:
        out.print(_text(words))


def _text(words: str) -> str:
    """Text as it is printed. What is not UTF-8 in the name of a file is shown as an escape."""
    return escape(words.encode(errors="backslashreplace").decode())


@contextmanager
def _reporting() -> Iterator[tuple[datasets.Track, datasets.Tell]]:
    """What downloads and imports are told to: bars on a terminal, else a line now and then."""
    if not err.is_terminal:
        yield _track_plainly, _now_and_then()
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        TextColumn("{task.fields[told]}", table_column=Column(no_wrap=True)),
    )
    with Progress(*columns, console=err, expand=True) as bars:

        def track(file: str) -> Callable[[int, int | None], None]:
            bar = bars.add_task(_text(file), total=None, told="")
            amount = _amount()
            return lambda done, total: bars.update(
                bar, completed=done, total=total, told=amount(done, total)
            )

        bar = None

        def tell(message: str) -> None:
            nonlocal bar
            if bar is None:
                bar = bars.add_task("", total=None, told="")
            bars.update(bar, description=_text(message))

        yield track, tell


def _track_plainly(file: str) -> Callable[[int, int | None], None]:
    amount, tell = _amount(), _now_and_then()

    def progress(done: int, total: int | None) -> None:
        tell(f"{file}: {amount(done, total)}", done == total)

    return progress


def _now_and_then() -> Callable[..., None]:
    """Prints the first message, then one every few seconds, and any that is the last."""
    last = -PLAIN_SECONDS

    def tell(message: str, always: bool = False) -> None:
        nonlocal last
        if always or time.monotonic() - last >= PLAIN_SECONDS:
            last = time.monotonic()
            print(message, file=sys.stderr, flush=True)

    return tell


def _amount() -> Callable[[int, int | None], str]:
    """Says how much has come and how fast, since the first time it was asked."""
    begin: tuple[float, int] | None = None

    def say(done: int, total: int | None) -> str:
        nonlocal begin
        begin = begin or (time.monotonic(), done)
        seconds, new = time.monotonic() - begin[0], done - begin[1]
        speed = f", {decimal(int(new / seconds))}/s" if seconds > 0.1 else ""
        return decimal(done) + ("" if total is None else f" of {decimal(total)}") + speed

    return say
