"""The server of a federation: a plain loop over rounds and phases, on Flower's messages.

It asks, waits no longer than the deadline, checks every reply as if it came from a stranger, adds
up what is sound, and merges the sum as a simulation does. A round to which too few replied is
repeated; one whose sum is unusable never happened, neither for the server nor for its clients.
After each round everything is saved, and a server that is started again goes on from there.
"""

import logging
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flwr.app import Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from jax import random

from fedda import api
from fedda.core import tree
from fedda.core.algorithm import Phase
from fedda.core.round import merged
from fedda.core.tree import PyTree
from fedda.errors import InputError
from fedda.flower import messages as wire
from fedda.flower.aggregation import RECENT, Halted, NotFinite, Size, Summed, add_up, plain_sum
from fedda.flower.messages import Refused
from fedda.flower.settings import Method, Settings, method
from fedda.flower.state import Progress
from fedda.flower.transport import Mail
from fedda.flower.unmasking import secure_sum
from fedda.simulate import train as simulate
from fedda.simulate.cohort import draw_cohort
from fedda.simulate.train import Row
from fedda.storage.directory import RunDirectory

log = logging.getLogger("fedda.flower")


class Served(NamedTuple):
    """A federation after its last round."""

    state: Any
    history: list[Row]
    events: Counter[str]  # what did not go as it should, and how often
    events_by_client: Mapping[str, Mapping[str, int]]  # those for which one client is responsible


def server_app(settings: Settings) -> ServerApp:
    """A server that trains a federation as the settings say."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, settings)

    return app


def serve(grid: Grid, settings: Settings) -> Served:
    """Train a federation to its last round.

    Raises:
        InputError: Too few clients came, or none of the rounds changed the model.
    """
    chosen = method(settings)
    first = chosen.first_state(settings)
    with RunDirectory(settings.directory, chosen.identity(settings)) as kept:
        found = kept.read_back(lambda: first)
        state = first if found is None else jax.tree.map(jnp.asarray, found.run)
        progress = Progress() if found is None else Progress(**found.progress)
        if 0 < progress.round < settings.rounds:
            progress.event("restarts", "continued from round %d", progress.round)
        server = Server(grid, settings, chosen, state, progress)
        server.mail.gather(settings.nodes or settings.cohort)
        while progress.round < settings.rounds:
            server.do_round()
            kept.log(server.row())
            kept.save(progress.round, server.state, asdict(progress))
            kept.wait()  # a server that is killed now need not repeat the round
            while kept.notes:
                log.warning(kept.notes.pop())
        kept.finish(server.summary)
    if progress.skipped_rounds == progress.round:
        raise InputError(
            f"all of the {progress.round} rounds were skipped, so the model was not trained. "
            f"Events: {progress.events}. At least one round must have `least` sound replies. Read "
            "in the log why the replies were refused; it names the clients."
        )
    by_client = progress.events_by_client
    return Served(server.state, kept.history, Counter(progress.events), by_client)


class Server:
    """The federation as the server sees it."""

    def __init__(
        self, grid: Grid, settings: Settings, chosen: Method, state: Any, progress: Progress
    ) -> None:
        self.settings, self.method, self.state, self.progress = settings, chosen, state, progress
        self.mail = Mail(grid, settings.deadline, progress)
        kept = jax.eval_shape(chosen.algorithm.memory, chosen.hp, state.params)
        self.remembers = bool(jax.tree.leaves(kept))
        self.full_rounds = api.last_rounds(settings.stabilise, settings.rounds)
        self.population = 0  # in the round before, or none before
        self.recent = [deque[Size](maxlen=RECENT) for _ in chosen.algorithm.phases]

    def do_round(self) -> None:
        """One round, repeated where too few reply, and skipped where that does not help."""
        for attempt in range(self.settings.attempts):
            try:
                self.attempt()
                break
            except Halted as reason:
                self.progress.event("repeated_rounds", "round %d: %s", self.progress.round, reason)
                if attempt + 1 < self.settings.attempts:
                    self.mail.gather(self.settings.least)
        else:
            self.progress.skipped_rounds += 1
        self.progress.round += 1

    def attempt(self) -> None:
        """A round, which changes the state only if all of its phases are done."""
        number, settings = self.progress.round, self.settings
        self.mail.discover()
        everyone = sorted(self.mail.clients)
        self.compare_population(len(everyone))
        size = min(settings.cohort, len(everyone))
        if size < settings.least:
            raise Halted(f"{size} clients are there, {settings.least} are needed")
        drawn = draw_cohort(settings.seed, number, len(everyone), size)
        cohort = [everyone[place] for place in drawn]
        state, counted, usable = self.state, dict(self.progress.counted), True
        loss = examples = 0.0
        for place, phase in enumerate(self.method.algorithm.phases):
            asked = everyone if phase.everyone else cohort
            orders = {key: self.order(place, key, counted) for key in asked}
            found = self.summed(phase, state, orders, self.recent[place])
            after, finite = self.merged(phase, state, found.upload)
            if not finite:
                found = self.without_culprits(phase, state, found)
                after, finite = self.merged(phase, state, found.upload)
            if len(found.counted) < settings.least:
                raise Halted(f"{len(found.counted)} of {len(asked)} replies were sound")
            state, usable = after, usable and finite
            counted |= {str(key): orders[key].serial for key in found.counted}
            loss += float(found.seen.loss)
            examples += float(found.seen.examples)
        if not usable:
            self.progress.event("unusable_sums", "round %d: the sum was not finite", number)
            self.progress.skipped_rounds += 1
            return
        self.state, self.progress.counted = state, counted
        self.progress.train_loss = loss / examples if examples else None

    def merged(self, phase: Phase, state: Any, upload: PyTree) -> tuple[Any, bool]:
        """The state after a sum, or one upload, was merged, and whether all of it is finite."""
        total = jax.tree.map(jnp.asarray, upload)
        after = _merge(phase, self.method.hp, self.state, state, total)
        return after, bool(_finite((total, after)))

    def without_culprits(self, phase: Phase, state: Any, found: Summed) -> Summed:
        """The sum without the replies that spoil the state even if each is merged alone.

        If all of them do, the reason is not with a client, and the sum stays as it is.
        """
        sound = {
            partition: reply
            for partition, reply in found.replies.items()
            if self.merged(phase, state, reply.upload)[1]
        }
        if not sound:
            return found
        for partition in found.replies.keys() - sound.keys():
            self.refuse(partition, Refused("merged alone, it makes the server's state not finite"))
        return add_up(sound)

    def compare_population(self, now: int) -> None:
        """Tells where a mean over what all clients remember can no longer be right."""
        if self.remembers and self.population not in (0, now):
            words = "%d clients, where there were %d: what is kept of all is off from now on"
            self.progress.event("changed_populations", words, now, self.population)
        self.population = now

    def order(self, phase: int, partition: int, counted: Mapping[str, int]) -> wire.Order:
        """What one client is asked to do; `counted` includes the phases of this round so far."""
        self.progress.serial += 1
        number, name = self.progress.round, str(partition)
        return wire.Order(
            self.method.name,
            self.method.options,
            self.settings.seed,
            number,
            phase,
            full=number >= self.settings.rounds - self.full_rounds,
            clients=len(self.mail.clients),
            serial=self.progress.serial,
            counted=counted.get(name, 0),
            settled=self.progress.counted.get(name, 0),
            hyper=self.method.hyper,
        )

    def summed(
        self, phase: Phase, state: Any, orders: Mapping[int, wire.Order], recent: deque[Size]
    ) -> Summed:
        """The sum of what the asked clients upload, and who is in it."""
        message = wire.pack(_send(phase, self.method.hp, state))
        outgoing = {
            partition: self.mail.message(
                RecordDict({**order.records(), "message": message}),
                "train",
                self.mail.clients[partition],
            )
            for partition, order in orders.items()
        }
        like, secure, plan = self.upload_like(phase), self.settings.secure, self.settings.task.plan
        if any(order.full for order in orders.values()):
            plan = plan.full()
        if secure is None:
            found = plain_sum(
                self.settings,
                plan,
                phase,
                orders,
                like,
                float(_norm(state.params)),
                recent,
                self.mail.ask(outgoing),
                self.refuse,
                self.note,
            )
        else:
            least = self.settings.least
            found = secure_sum(secure, outgoing, like, plan, self.mail.ask, self.refuse, least)
        if found.clipped:
            words = "uploads of %d clients were clipped"
            self.progress.event("clipped_uploads", words, found.clipped)
        for partition in orders.keys() - found.counted:
            log.warning("round %d goes on without client %d", self.progress.round, partition)
        return found

    def refuse(self, partition: int, reason: Refused) -> None:
        self.progress.nonfinite_clients += isinstance(reason, NotFinite)
        self.note("refused_replies", partition, reason)

    def note(self, event: str, partition: int, reason: object) -> None:
        """Log and count an event for which one client is responsible."""
        client = f"client {partition} (node {self.mail.clients[partition]})"
        self.progress.client_event(event, client, reason)

    def upload_like(self, phase: Phase) -> PyTree:
        """The shapes and types of what a client uploads in a phase."""
        chosen, task = self.method, self.settings.task

        def upload(hp: Any, state: Any) -> PyTree:
            memory = chosen.algorithm.memory(hp, state.params)
            key = random.key(0)
            return phase.work(hp, task, phase.send(hp, state), memory, chosen.example, key)[0]

        return jax.eval_shape(upload, chosen.hp, self.state)

    def row(self) -> Row:
        """What a person wants to see of the last round, as in a simulation."""
        progress, settings = self.progress, self.settings
        row: Row = {"round": progress.round, "train_loss": progress.train_loss}
        due = progress.round % settings.eval_every == 0 or progress.round == settings.rounds
        if settings.test is not None and due:
            evaluate = simulate.evaluate(settings.task, False, None)
            found = evaluate(self.state.params, *settings.test)
            row |= {name: float(value) for name, value in found.items()}
        if settings.evaluate is not None and due:
            row |= settings.evaluate(self.state.params)
        return row | {name: getattr(progress, name) for name in simulate.TOTALS}

    def summary(self) -> dict[str, Any]:
        return {
            "algorithm": self.method.name,
            "rounds": self.progress.round,
            "clients": len(self.mail.clients),
            "events": self.progress.events,
            "events_by_client": self.progress.events_by_client,
            **{name: getattr(self.progress, name) for name in simulate.TOTALS},
        }


@partial(jax.jit, static_argnames="phase")
def _send(phase: Phase, hp: Any, state: Any) -> PyTree:
    return phase.send(hp, state)


@partial(jax.jit, static_argnames="phase")
def _merge(phase: Phase, hp: Any, before: Any, state: Any, total: PyTree) -> Any:
    return merged(phase, hp, before, state, total)


_finite = jax.jit(tree.all_finite)


@jax.jit
def _norm(params: PyTree) -> jax.Array:
    squares = [
        jnp.square(leaf.astype(jnp.result_type(float))).sum() for leaf in jax.tree.leaves(params)
    ]
    return jnp.sqrt(sum(squares))
