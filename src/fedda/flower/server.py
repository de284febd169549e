"""The server of a federation: a plain loop over rounds and phases, on Flower's messages.

It asks, waits no longer than the deadline, checks every reply as if it came from a stranger, adds
up what is sound, and merges the sum as a simulation does. A round to which too few replied is
repeated; one whose sum is unusable never happened, neither for the server nor for its clients.
After each round everything is saved, and a server that is started again goes on from there.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from jax import random

from fedda import algorithms, api, simulate, tree
from fedda.checkpoint import Checkpoints
from fedda.cohort import draw_cohort
from fedda.core import Algorithm, Phase, Seen, as_sent
from fedda.data.shards import from_clients
from fedda.errors import InputError
from fedda.files import read_rows, write_whole
from fedda.flower import wire
from fedda.flower.secure import Halted, Secure, Summed, secure_sum
from fedda.flower.wire import Refused
from fedda.local import Weighted
from fedda.privacy import only_summed
from fedda.simulate import Row
from fedda.task import Plan, Task
from fedda.tree import PyTree

log = logging.getLogger("fedda.flower")
PAUSE = 0.2  # seconds between two looks at what has come in: each is work for the SuperLink


class Settings(NamedTuple):
    """How a federation is trained."""

    algorithm: str | Algorithm
    task: Task
    example: tuple[Any, Any]  # arrays (x, y) of one example or more, like the clients' own
    rounds: int
    cohort: int  # clients that are asked in a round
    chosen: Mapping[str, Any] = {}  # hyper-parameters and options of the algorithm
    seed: int = 0
    stabilise: int = 0  # rounds at the end in which a client takes one step with all its examples
    test: tuple[Any, Any] | None = None
    evaluate: Callable[[PyTree], Mapping[str, float]] | None = None  # the model, in your own way
    eval_every: int = 1
    nodes: int = 0  # that must be there before the first round; 0: as many as a cohort has clients
    least: int = 1  # sound replies that a phase needs
    deadline: float = 600.0  # seconds, for the replies of a phase and for nodes to come
    attempts: int = 3  # at a round, before it is skipped
    most_norm: float | None = None  # of an upload, after a weighted one was divided by its weight
    most_weight: float | None = None  # of a weighted upload: the examples that a client may have
    secure: Secure | None = None  # sums alone are revealed; the clients have `secure_mods`
    directory: Path | None = None  # for metrics, checkpoints and the summary


class Served(NamedTuple):
    """A federation after its last round."""

    state: Any
    history: list[Row]
    events: Counter[str]  # what did not go as it should, and how often


class Client(NamedTuple):
    node: int
    examples: int


class Reply(NamedTuple):
    """A sound one."""

    upload: PyTree
    seen: Seen


class Progress(NamedTuple):
    """What a server that is started again must know besides its state."""

    round: int = 0  # the next one
    serial: int = 0  # of the last message
    counted: Mapping[str, int] = {}  # the last upload of each client that counted, by its serial
    events: Mapping[str, int] = {}
    bytes_down: int = 0
    bytes_up: int = 0
    nonfinite_clients: int = 0
    skipped_rounds: int = 0


class TooFew(Exception):  # noqa: N818  # as one says it
    """A phase had fewer sound replies than it needs."""


def server_app(settings: Settings) -> ServerApp:
    """A server that trains a federation as the settings say."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, settings)

    return app


def serve(grid: Grid, settings: Settings) -> Served:
    """Trains a federation to its last round."""
    server = Server(grid, settings)
    with Records(settings.directory) as records:
        server.take_up(*records.read_back(server.state))
        server.gather(settings.nodes or settings.cohort)
        while server.progress.round < settings.rounds:
            server.do_round()
            records.add(server.row(), server.state, server.progress)
        records.finish(server.summary())
    return Served(server.state, records.history, Counter(server.progress.events))


class Server:
    """The federation as the server sees it."""

    def __init__(self, grid: Grid, settings: Settings) -> None:
        record, hyper = algorithms.configure(settings.algorithm, settings.chosen)
        model = settings.task.model
        _check(settings)
        if settings.secure is not None and (settings.most_norm or settings.most_weight):
            raise InputError(
                "most_norm and most_weight are of single uploads, which a server with secure "
                "aggregation does not see. Give most and most_weight of Secure instead."
            )
        if settings.secure is not None and any(
            phase.opened not in (as_sent, only_summed) for phase in record.phases
        ):
            raise InputError(
                "compressed and bounded uploads are opened one by one, and a server with secure "
                "aggregation sees only their sum. Leave one of the two out."
            )
        self.grid, self.settings, self.algorithm = grid, settings, record
        self.hyper = {name: float(value) for name, value in hyper._asdict().items()}
        self.hp = api.traced(hyper, model)
        self.name = settings.algorithm if isinstance(settings.algorithm, str) else "own"
        known = algorithms.options(self.name) if self.name != "own" else {}
        options = {name: value for name, value in settings.chosen.items() if name in known}
        self.options = json.dumps(options, sort_keys=True)
        params = jax.jit(model.init)(random.fold_in(random.key(settings.seed), 0))
        self.state: Any = jax.jit(record.init)(self.hp, params)
        self.example = from_clients([settings.example]).shard(0)
        self.clients: dict[int, Client] = {}  # by partition
        self.strangers: set[int] = set()  # nodes that gave no usable answer to what they are
        self.late: dict[str, int] = {}  # messages whose time is over, and whom they asked
        self.progress = Progress()
        self.events: Counter[str] = Counter()
        self.seen = Seen(0.0, 0.0)  # type: ignore[arg-type]  # of the last round

    def take_up(self, state: Any, progress: Progress) -> None:
        """Goes on from where an earlier server was."""
        self.state, self.progress = state, progress
        self.events = Counter(progress.events)
        if 0 < progress.round < self.settings.rounds:
            self.event("restarts", "continued from round %d", progress.round)

    def gather(self, least: int) -> None:
        """Waits for so many clients with examples."""
        end = time.monotonic() + self.settings.deadline
        while True:
            self.discover()
            if len(self.clients) >= least:
                return
            if time.monotonic() > end:
                raise InputError(
                    f"{least} clients are needed, and {len(self.clients)} have come in "
                    f"{self.settings.deadline:g} s. Start more nodes, or lower nodes or cohort."
                )
            time.sleep(PAUSE)

    def discover(self) -> None:
        """Asks the nodes that are new who they are, and forgets those that have gone."""
        nodes = set(self.grid.get_node_ids())
        self.clients = {key: one for key, one in self.clients.items() if one.node in nodes}
        new = nodes - {client.node for client in self.clients.values()} - self.strangers
        ids = self.push({node: self.message(RecordDict(), "query", node) for node in sorted(new)})
        self.strangers |= new  # until they have answered: one that is silent is waited for but once
        for node, reply in self.pull(ids):
            try:
                about = wire.read(_content(reply), "fedda", partition=int, examples=int)
                if about["partition"] in self.clients:
                    raise Refused(f"partition {about['partition']} has a node already")
                if about["examples"] < 1:
                    raise Refused("it has no examples")
            except Refused as reason:
                self.event("refused_nodes", "node %d: %s", node, reason)
                continue
            self.strangers.remove(node)
            self.clients[about["partition"]] = Client(node, about["examples"])

    def do_round(self) -> None:
        """One round, repeated where too few reply, and skipped where that does not help."""
        for attempt in range(self.settings.attempts):
            try:
                self.attempt()
                break
            except TooFew as reason:
                self.event("repeated_rounds", "round %d: %s", self.progress.round, reason)
                if attempt + 1 < self.settings.attempts:
                    self.gather(min(self.settings.least, self.settings.cohort))
        else:
            self.change(skipped_rounds=1)
        self.change(round=1)

    def attempt(self) -> None:
        """A round, which changes the state only if all of its phases are done."""
        number, settings = self.progress.round, self.settings
        self.discover()
        everyone = sorted(self.clients)
        size = min(settings.cohort, len(everyone))
        if size < settings.least:
            raise TooFew(f"{size} clients are there, {settings.least} are needed")
        drawn = draw_cohort(settings.seed, number, len(everyone), size)
        cohort = [everyone[place] for place in drawn]
        state, counted, usable = self.state, dict(self.progress.counted), True
        loss = examples = 0.0
        for place, phase in enumerate(self.algorithm.phases):
            asked = everyone if phase.everyone else cohort
            orders = {key: self.order(place, key, counted) for key in asked}
            found = self.summed(phase, state, orders)
            if len(found.counted) < settings.least:
                raise TooFew(f"{len(found.counted)} of {len(asked)} replies were sound")
            total = jax.tree.map(jnp.asarray, found.upload)
            state = _merge(phase, self.hp, state, total)
            usable = usable and bool(_finite((total, state)))
            counted |= {str(key): orders[key].serial for key in found.counted}
            loss += float(found.seen.loss)
            examples += float(found.seen.examples)
        if not usable:
            self.event("unusable_sums", "round %d: the sum was not finite", number)
            self.change(skipped_rounds=1)
            return
        self.state, self.seen = state, Seen(loss, examples)  # type: ignore[arg-type]
        self.progress = self.progress._replace(counted=counted)

    def order(self, phase: int, partition: int, counted: Mapping[str, int]) -> wire.Order:
        """What one client is asked to do; `counted` includes the phases of this round so far."""
        self.change(serial=1)
        number, name = self.progress.round, str(partition)
        return wire.Order(
            self.name,
            self.options,
            self.settings.seed,
            number,
            phase,
            full=number >= self.settings.rounds - self.settings.stabilise,
            clients=len(self.clients),
            serial=self.progress.serial,
            counted=counted.get(name, 0),
            settled=self.progress.counted.get(name, 0),
            hyper=self.hyper,
        )

    def summed(self, phase: Phase, state: Any, orders: Mapping[int, wire.Order]) -> Summed:
        """The sum of what the asked clients upload, and who is in it."""
        message = wire.pack(_send(phase, self.hp, state))
        outgoing = {
            partition: self.message(
                RecordDict({**order.records(), "message": message}),
                "train",
                self.clients[partition].node,
            )
            for partition, order in orders.items()
        }
        like = self.upload_like(phase)
        if self.settings.secure is None:
            found = self.plain_sum(phase, outgoing, orders, like)
        else:
            found = self.secure_sum(self.settings.secure, outgoing, orders, like)
        for partition in orders.keys() - found.counted:
            log.warning("round %d goes on without client %d", self.progress.round, partition)
        return found

    def plain_sum(
        self,
        phase: Phase,
        outgoing: Mapping[int, Message],
        orders: Mapping[int, wire.Order],
        like: PyTree,
    ) -> Summed:
        """The sum of the replies that are sound, each checked by itself."""
        replies: dict[int, Reply] = {}
        for partition, answer in self.ask(outgoing):
            try:
                content = _content(answer)
                order = orders[partition]
                replies[partition] = self.checked(phase, content, order, partition, like)
            except Refused as reason:
                self.refuse(partition, reason)
        if not replies:
            raise TooFew("no reply was sound")
        upload = _sum([replies[key].upload for key in sorted(replies)])
        seen = _sum([one.seen for one in replies.values()])
        return Summed(upload, seen, frozenset(replies), clipped=0)

    def secure_sum(
        self,
        secure: Secure,
        outgoing: Mapping[int, Message],
        orders: Mapping[int, wire.Order],
        like: PyTree,
    ) -> Summed:
        """The sum alone: who is in it is known, and nothing of what each has uploaded."""
        plan = self.settings.task.plan
        if any(order.full for order in orders.values()):
            plan = Plan(plan.batch, unit="full")
        try:
            found = secure_sum(secure, outgoing, like, plan, self.ask, self.refuse)
        except Halted as reason:
            raise TooFew(str(reason)) from reason
        if found.clipped:
            self.event("clipped_uploads", "uploads of %d clients were clipped", found.clipped)
        return found

    def ask(self, messages: Mapping[int, Message]) -> Iterator[tuple[int, Message]]:
        """Sends messages to clients, and gives the replies of those that reply; counts bytes."""
        for message in messages.values():
            self.change(bytes_down=wire.nbytes(message.content))
        for partition, reply in self.pull(self.push(messages)):
            if reply.has_content():
                self.change(bytes_up=wire.nbytes(reply.content))
            yield partition, reply

    def refuse(self, partition: int, reason: Refused) -> None:
        self.event("refused_replies", "client %d: %s", partition, reason)

    def upload_like(self, phase: Phase) -> PyTree:
        """The shapes and types of what a client uploads in a phase."""
        example, task = self.example, self.settings.task

        def upload(hp: Any, state: Any) -> PyTree:
            memory = self.algorithm.memory(hp, state.params)
            key = random.key(0)
            return phase.work(hp, task, phase.send(hp, state), memory, example, key)[0]

        return jax.eval_shape(upload, self.hp, self.state)

    def checked(
        self, phase: Phase, content: RecordDict, order: wire.Order, partition: int, like: PyTree
    ) -> Reply:
        """A reply that is what was asked for, from whom it was asked, and sound; or a refusal."""
        about = wire.read(content, "fedda", algorithm=str, serial=int, partition=int)
        if about != dict(order.reply(partition)):
            raise Refused(f"it belongs to another order: {about}")
        if "upload" not in content.array_records or "seen" not in content.metric_records:
            raise Refused("it has no upload, or does not say what was seen")
        upload = _opened(phase, wire.unpack(content.array_records["upload"], like))
        said = content.metric_records["seen"]
        seen = Seen(*(np.float64(said.get(name, np.nan)) for name in Seen._fields))  # type: ignore[arg-type]
        if not _all_finite((upload, seen)):
            self.change(nonfinite_clients=1)
            raise Refused("a number is not finite")
        self.check_size(upload)
        return Reply(upload, seen)

    def check_size(self, upload: PyTree) -> None:
        settings, weight = self.settings, 1.0
        if isinstance(upload, Weighted):
            weight = float(upload.weight)
            if weight <= 0 or weight > (settings.most_weight or np.inf):
                raise Refused(f"its weight is {weight:g}")
            upload = upload.sum
        if settings.most_norm is None:
            return
        with np.errstate(over="ignore"):  # an infinite norm is out of bounds too
            squares = [np.square(leaf, dtype=np.float64).sum() for leaf in jax.tree.leaves(upload)]
        norm = float(np.sqrt(np.sum(squares))) / weight
        if norm > settings.most_norm:
            raise Refused(f"its norm is {norm:g}, more than {settings.most_norm:g}")

    def message(self, content: RecordDict, kind: str, node: int) -> Message:
        """A message to a node, which nobody delivers after the deadline."""
        group = str(self.progress.round)
        return self.grid.create_message(content, kind, node, group, self.settings.deadline)

    def push(self, messages: Mapping[int, Message]) -> dict[str, int]:
        """Sends messages to whom they are for; their ids, with the same."""
        ids = list(self.grid.push_messages(list(messages.values())))
        return {name: key for name, key in zip(ids, messages, strict=True) if name}

    def pull(self, waiting: dict[str, int]) -> Iterator[tuple[int, Message]]:
        """A reply from each that was asked, as they come; what misses the deadline is late."""
        end = time.monotonic() + self.settings.deadline
        answered: set[str] = set()
        while len(answered) < len(waiting) and time.monotonic() < end:
            open_ids = [name for name in waiting if name not in answered]
            for reply in self.grid.pull_messages([*open_ids, *self.late]):
                name = reply.metadata.reply_to_message_id
                if name in self.late:
                    self.event("late_replies", "client %d: too late", self.late.pop(name))
                elif name in answered or name not in waiting:
                    self.event("repeated_replies", "a reply to %s came again", name)
                else:
                    answered.add(name)
                    yield waiting[name], reply
            if len(answered) < len(waiting):
                time.sleep(PAUSE)
        for name in waiting.keys() - answered:
            self.event("missing_replies", "client or node %d has not replied", waiting[name])
            self.late[name] = waiting[name]

    def event(self, name: str, words: str, *details: object) -> None:
        """Something that did not go as it should: logged, and counted in the summary."""
        log.warning(words, *details)
        self.events[name] += 1
        self.progress = self.progress._replace(events=dict(self.events))

    def change(self, **by: int) -> None:
        """Adds to the numbers of the progress."""
        now = self.progress._asdict()
        self.progress = self.progress._replace(**{name: now[name] + by[name] for name in by})

    def row(self) -> Row:
        """What a person wants to see of the last round, as in a simulation."""
        progress, settings = self.progress, self.settings
        seen = float(self.seen.loss) / max(float(self.seen.examples), 1)
        row: Row = {"round": progress.round, "train_loss": seen}
        due = progress.round % settings.eval_every == 0 or progress.round == settings.rounds
        if settings.test is not None and due:
            found = simulate.evaluate(settings.task, False, self.state.params, *settings.test)
            row |= {name: float(value) for name, value in found.items()}
        if settings.evaluate is not None and due:
            row |= settings.evaluate(self.state.params)
        return row | {name: getattr(progress, name) for name in simulate.TOTALS}

    def summary(self) -> dict[str, Any]:
        return {
            "algorithm": self.name,
            "rounds": self.progress.round,
            "clients": len(self.clients),
            "events": dict(self.events),
            **{name: getattr(self.progress, name) for name in simulate.TOTALS},
        }


def _check(settings: Settings) -> None:
    """Refuses what no federation can be trained with."""
    for name in ("rounds", "cohort", "eval_every", "least", "attempts"):
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"{name} must be a whole number of at least 1, got {value!r}.")
    if settings.least > settings.cohort:
        raise InputError(
            f"least must be at most cohort, which is {settings.cohort}, got {settings.least}: no "
            "round would have enough replies. Lower least or raise cohort."
        )
    if not settings.deadline > 0:
        raise InputError(f"deadline must be a positive number of seconds, got {settings.deadline}.")
    api.check_seed(settings.seed)


def _content(reply: Message) -> RecordDict:
    if reply.has_error():
        raise Refused(f"an error: {reply.error.reason}")
    return reply.content


def _all_finite(values: PyTree) -> bool:
    return all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(values))


def _sum(uploads: Sequence[PyTree]) -> PyTree:
    return jax.tree.map(lambda *leaves: reduce(jnp.add, leaves), *uploads)


@partial(jax.jit, static_argnames="phase")
def _send(phase: Phase, hp: Any, state: Any) -> PyTree:
    return phase.send(hp, state)


@partial(jax.jit, static_argnames="phase")
def _opened(phase: Phase, sent: PyTree) -> PyTree:
    return phase.opened(sent)


@partial(jax.jit, static_argnames="phase")
def _merge(phase: Phase, hp: Any, state: Any, total: PyTree) -> Any:
    return phase.merge(hp, state, total)


_finite = jax.jit(tree.all_finite)


class Records:
    """The files of a federation: metrics, a line for each round, checkpoints, and a summary."""

    def __init__(self, directory: Path | None) -> None:
        self.directory, self.history = directory, list[Row]()
        self.checkpoints: Checkpoints | None = None
        if directory is not None:
            directory.mkdir(parents=True, exist_ok=True)
            self.checkpoints = Checkpoints(directory / "checkpoints")

    def __enter__(self) -> "Records":
        return self

    def __exit__(self, *error: object) -> None:
        if self.checkpoints is not None:
            self.checkpoints.close()

    def read_back(self, state: Any) -> tuple[Any, Progress]:
        """The newest whole checkpoint or the beginning; lines of later rounds are cut off."""
        if self.directory is None or self.checkpoints is None:
            return state, Progress()
        written = read_rows(self.directory / "metrics.jsonl")
        found, damaged = self.checkpoints.newest_whole(state, written.size)
        for note in damaged:
            log.warning(note)
        progress, size = Progress(), 0
        if found is not None:
            state = jax.tree.map(jnp.asarray, found.run)
            progress, size = Progress(**found.numbers["progress"]), found.numbers["metrics_bytes"]
        self.history = [row for row in written.rows if row["round"] <= progress.round]
        self.checkpoints.drop_after(progress.round if found is not None else -1)
        with open(self.directory / "metrics.jsonl", "ab") as lines:
            lines.truncate(size)
        return state, progress

    def add(self, row: Row, state: Any, progress: Progress) -> None:
        """Saves a round to its end: a server that is killed after it need not repeat it."""
        self.history.append(row)
        if self.directory is None or self.checkpoints is None:
            return
        with open(self.directory / "metrics.jsonl", "ab") as lines:
            lines.write(json.dumps(row).encode() + b"\n")
            size = lines.tell()
        numbers = {"metrics_bytes": size, "progress": progress._asdict()}
        self.checkpoints.save(progress.round, state, numbers)
        self.checkpoints.wait()

    def finish(self, summary: Mapping[str, Any]) -> None:
        if self.directory is not None:
            write_whole(self.directory / "summary.json", json.dumps(summary, indent=2) + "\n")
