"""The Flower server: a loop over rounds and phases.

In every phase the server asks clients, waits for them until the deadline, adds up the valid replies
and merges the sum as a simulation does. A round with too few replies is repeated. A round whose sum
is not finite, or that raises the loss on the test set too much, is skipped, on the server and on
its clients. The server saves its state after every round, and continues from there when it is
started again.
"""

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from jax import random

from fedda import algorithms, api
from fedda.core import tree
from fedda.core.algorithm import Algorithm, Phase
from fedda.core.check_structure import check_parts
from fedda.core.round import merged
from fedda.core.tree import PyTree
from fedda.data.federation import from_clients
from fedda.errors import InputError
from fedda.flower.aggregation import Aggregate, AggregationError, Exchange, PlainAggregator
from fedda.flower.messages import CUSTOM, MessageError, Order, pack
from fedda.flower.outliers import Size
from fedda.flower.secure import secure_sum
from fedda.flower.settings import Settings, check
from fedda.flower.state import Progress, log
from fedda.flower.transport import Transport, listed
from fedda.simulate import train as simulate
from fedda.simulate.cohort import draw_cohort
from fedda.simulate.train import Row
from fedda.storage.directory import RunDirectory

ENOUGH = 10  # clients whose faults show that no client can train


class Served(NamedTuple):
    """A federation after its last round.

    Attributes:
        state: The server's state; `state.params` are the parameters of the model.
        history: One row of metrics for each round.
        events: What went wrong, and how often.
        events_by_client: The events for which one client is responsible.
    """

    state: Any
    history: list[Row]
    events: Counter[str]
    events_by_client: Mapping[str, Mapping[str, int]]


def server_app(settings: Settings) -> ServerApp:
    """Return a Flower server that trains a federation with these settings."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, settings)

    return app


def serve(grid: Grid, settings: Settings) -> Served:
    """Train a federation until its last round.

    Args:
        grid: Flower's grid, which a `ServerApp` is called with.
        settings: What to train, and how.

    Returns:
        The final state of the server and the history of the rounds.

    Raises:
        InputError: A setting is wrong, too few clients joined, all clients refused to train, or all
            rounds were skipped.
    """
    server = Server(grid, settings)
    progress = server.progress
    with RunDirectory(settings.directory, server.identity()) as directory:
        if (saved := directory.read_back(lambda: server.state)) is not None:
            server.resume(saved.run, saved.progress)
        if 0 < progress.round < settings.rounds:
            progress.event("restarts", f"continued from round {progress.round}")
        if progress.round < settings.rounds:
            server.log_start()
        server.transport.wait_for_clients(settings.nodes or settings.cohort)
        while progress.round < settings.rounds:
            start = time.monotonic()
            server.run_round()
            directory.log(row := server.row())
            server.log_round(row, time.monotonic() - start)
            progress.accepted = [[*sums.comparison.accepted] for sums in server.plain]
            directory.save(progress.round, server.state, asdict(progress))
            directory.wait()  # so that a server that is killed now need not repeat the round
            while directory.notes:
                log.warning(directory.notes.pop())
        directory.finish(server.summary)
        log.info("Finished %d rounds. Events: %s", progress.round, progress.events or "none")
    if progress.skipped_rounds == progress.round:
        raise InputError(
            f"all of the {progress.round} rounds were skipped, so the model was not trained. "
            f"Events: {progress.events}. At least one round must have `least` valid replies. The "
            "log names the clients and says why their replies were refused."
        )
    return Served(
        state=server.state,
        history=directory.history,
        events=Counter(progress.events),
        events_by_client=progress.events_by_client,
    )


class Server:
    """The state of a federation, and the rounds that change it."""

    def __init__(self, grid: Grid, settings: Settings) -> None:
        self.settings, self.name, options = settings, CUSTOM, {}
        if isinstance(settings.algorithm, Algorithm):
            check_parts(settings.algorithm)
        self.algorithm, self.hyper = algorithms.configure(settings.algorithm, settings.chosen)
        check(settings, self.algorithm, self.hyper)
        if isinstance(settings.algorithm, str):
            self.name = settings.algorithm
            known = algorithms.options(self.name).items()
            options = {name: settings.chosen.get(name, values[0]) for name, values in known}
        self.options = json.dumps(options, sort_keys=True)
        self.full_from = settings.rounds - api.last_rounds(settings.stabilise, settings.rounds)
        self.hp = api.traced(self.hyper, settings.task.model)
        params = jax.jit(settings.task.model.init)(random.fold_in(random.key(settings.seed), 0))
        self.state = jax.jit(self.algorithm.init)(self.hp, params)
        # What a client works with, besides the server's message: its memory, data and key.
        memory = jax.eval_shape(self.algorithm.memory, self.hp, params)
        self.client = memory, from_clients([settings.example]).shard(0), random.key(0)
        self.population = 0  # in the round before; 0: there was none
        self.progress = Progress()
        self.transport = Transport(grid, self.name, settings.deadline, self.progress)
        self.plain = [PlainAggregator(self.transport, settings) for _ in self.algorithm.phases]
        self.asked: list[int] = []  # the clients that were asked in the last attempt at a round
        self.outcome = ""  # of the last round, for the log

    def identity(self) -> dict[str, str]:
        """Return what must stay the same for the federation to be continued."""
        chosen = {"algorithm": self.name, "options": self.options, "seed": str(self.settings.seed)}
        chosen |= {name: str(value) for name, value in self.hyper._asdict().items()}
        return chosen | tree.types("parameter ", self.settings.task.model.shapes())

    def resume(self, state: Any, progress: Mapping[str, Any]) -> None:
        """Continue from a saved state, with the sizes of the replies that were accepted before."""
        self.state = jax.tree.map(jnp.asarray, state)
        vars(self.progress).update(progress)
        for sums, sizes in zip(self.plain, self.progress.accepted, strict=False):
            sums.comparison.accepted.extend(Size(*size) for size in sizes)

    def run_round(self) -> None:
        """Run a round. Repeat it if too few clients reply, and skip it after the last attempt."""
        for attempt in range(self.settings.attempts):
            try:
                self.attempt_round()
                break
            except AggregationError as reason:
                self.progress.event("repeated_rounds", f"{self.title()} failed: {reason}")
                self.outcome = f"skipped: {reason}"
                if attempt + 1 < self.settings.attempts:
                    self.transport.wait_for_clients(self.settings.least)
        else:
            self.check_faults()
            self.progress.skipped_rounds += 1
        self.progress.round += 1

    def check_faults(self) -> None:
        """End a federation in which no client can train: further rounds would fail, too.

        The server must know a fault of each client that it has just asked, and of 10 clients or all
        of them. A federation that was able to train a round is never ended.

        Raises:
            InputError: The reasons of the clients.
        """
        faults = self.transport.faults
        enough = min(ENOUGH, len(self.transport.clients))
        if self.progress.counted or not self.asked or len(faults) < enough:
            return
        if faults.keys() >= set(self.asked):
            raise InputError(
                f"no client can train: all {len(faults)} clients that were asked have failed, "
                f"{self.settings.attempts} times in the last round."
                f"{listed('client', faults)}\nCorrect the clients or the settings, and start the "
                "run again."
            )

    def attempt_round(self) -> None:
        """Run all phases of a round; change the state only after the last of them."""
        number, least, replies = self.progress.round, self.settings.least, list[str]()
        self.asked = []
        self.transport.find_clients()
        everyone = sorted(self.transport.clients)
        self.compare_population(len(everyone))
        size = min(self.settings.cohort, len(everyone))
        if size < least:
            raise AggregationError(f"{size} clients have joined, {least} are needed")
        drawn = draw_cohort(self.settings.seed, number, len(everyone), size)
        cohort = self.asked = [everyone[place] for place in drawn]
        state, counted = self.state, dict(self.progress.counted)
        finite, worse = True, False
        loss = examples = 0.0
        for place, phase in enumerate(self.algorithm.phases):
            orders = {client: self.order(place, client, counted) for client in cohort}
            total = self.aggregate(place, state, orders)
            after, usable = self.merge(phase, state, total.upload)
            if not usable:
                total = self.without_culprits(phase, state, total)
                after, usable = self.merge(phase, state, total.upload)
            if phase is self.algorithm.phases[-1] and finite and usable and self.is_worse(after):
                total = self.without_suspect(phase, state, total)
                after, usable = self.merge(phase, state, total.upload)
                worse = self.is_worse(after)
            if len(total.counted) < least:
                raise AggregationError(f"{len(total.counted)} of {len(cohort)} replies were valid")
            replies.append(f"{len(total.counted)}/{len(cohort)}")
            state, finite = after, finite and usable
            counted |= {str(client): orders[client].serial for client in total.counted}
            loss += float(total.seen.loss)
            examples += float(total.seen.examples)
        if not finite:
            return self.skip("unusable_sums", "skipped: the sum was not finite")
        if worse:
            return self.skip("rolled_back_rounds", "rolled back: the loss on the test set rose")
        self.state, self.progress.counted = state, counted
        self.progress.train_loss = loss / examples if examples else None
        self.outcome = f"replies {', '.join(replies)}"  # of each phase

    def skip(self, event: str, outcome: str) -> None:
        """Leave the state as it was before the round."""
        self.outcome = outcome
        self.progress.event(event, f"{self.title()} {outcome}")
        self.progress.skipped_rounds += 1

    def compare_population(self, count: int) -> None:
        """Report a change after which a mean over the memory of all clients is wrong."""
        if jax.tree.leaves(self.client[0]) and self.population not in (0, count):
            text = f"{count} clients instead of {self.population}: means over all are now wrong"
            self.progress.event("changed_populations", text)
        self.population = count

    def order(self, phase: int, client: int, counted: Mapping[str, int]) -> Order:
        """Return the order to a client; `counted` includes the earlier phases of this round."""
        self.progress.serial += 1
        return Order(
            algorithm=self.name,
            options=self.options,
            seed=self.settings.seed,
            round=self.progress.round,
            phase=phase,
            full=self.progress.round >= self.full_from,
            clients=len(self.transport.clients),
            serial=self.progress.serial,
            resume_from=counted.get(str(client), 0),
            keep_from=self.progress.counted.get(str(client), 0),
            hyper=self.hyper._asdict(),
        )

    def aggregate(self, place: int, state: Any, orders: Mapping[int, Order]) -> Aggregate:
        """Return the sum of the clients' uploads in a phase."""
        settings, phase = self.settings, self.algorithm.phases[place]
        message, plan = _send(phase, self.hp, state), settings.task.plan

        def work(hp: Any, *inputs: Any) -> Any:
            return phase.work(hp, settings.task, *inputs)

        like, _, _ = jax.eval_shape(work, self.hp, message, *self.client)
        exchange = Exchange(
            phase=phase,
            plan=plan.full() if self.progress.round >= self.full_from else plan,
            params=state.params,
            message=pack(message),
            orders=orders,
            like=like,
        )
        if settings.secure is None:
            total = self.plain[place].sum(exchange)
        else:
            total = secure_sum(exchange, self.transport, settings.secure, settings.least)
        if total.clipped:
            text = f"uploads of {total.clipped} clients were clipped"
            self.progress.event("clipped_uploads", text)
        for client in orders.keys() - total.counted:
            log.warning("%s goes on without client %d", self.title(), client)
        return total

    def merge(self, phase: Phase, state: Any, upload: PyTree) -> tuple[Any, bool]:
        """Merge a sum, or one upload; return the new state, and whether all of it is finite."""
        total = jax.tree.map(jnp.asarray, upload)
        after = _merge(phase, self.hp, self.state, state, total)
        return after, bool(_all_finite((total, after)))

    def without_culprits(self, phase: Phase, state: Any, total: Aggregate) -> Aggregate:
        """Return the sum without the replies that make the state not finite even alone.

        If all of them do, no client is to blame, and the sum stays as it is.
        """
        valid = {
            client: reply
            for client, reply in total.replies.items()
            if self.merge(phase, state, reply.upload)[1]
        }
        if not valid:
            return total
        for client in total.replies.keys() - valid.keys():
            reason = MessageError("merged alone, it makes the server's state not finite")
            self.transport.refuse(client, reason)
        return Aggregate.of(valid)

    def is_worse(self, after: Any) -> bool:
        """Return whether the test loss exceeds `most_loss_ratio` times that before the round."""
        ratio = self.settings.most_loss_ratio
        if ratio is None:
            return False
        return not self.test_loss(after) <= ratio * self.test_loss(self.state)

    def without_suspect(self, phase: Phase, state: Any, total: Aggregate) -> Aggregate:
        """Return the sum without the reply that raises the loss on the test set most.

        If the loss remains too high without any single reply, no client is to blame, and the sum
        stays as it is.
        """
        losses, sums = dict[int, float](), dict[int, Aggregate]()
        for client in total.replies if len(total.replies) > 1 else ():
            others = {key: reply for key, reply in total.replies.items() if key != client}
            sums[client] = Aggregate.of(others)
            after, _ = self.merge(phase, state, sums[client].upload)
            if not self.is_worse(after):
                losses[client] = self.test_loss(after)
        if not losses:
            return total
        suspect = min(losses, key=losses.__getitem__)
        reason = "with its reply, the loss on the test set exceeds most_loss_ratio"
        self.transport.refuse(suspect, MessageError(reason))
        return sums[suspect]

    def test_loss(self, state: Any) -> float:
        """Return the loss on the test set."""
        return float(self.test_metrics(state.params)["loss"])

    def test_metrics(self, params: PyTree) -> Row:
        """Return the metrics on the test set."""
        evaluate = simulate.evaluate(self.settings.task, False, None)
        found = evaluate(params, *(self.settings.test or ()))
        return {name: float(value) for name, value in found.items()}

    def row(self) -> Row:
        """Return the metrics of the last round, as in a simulation."""
        progress, settings = self.progress, self.settings
        row: Row = {"round": progress.round, "train_loss": progress.train_loss}
        if progress.round % settings.eval_every == 0 or progress.round == settings.rounds:
            row |= self.evaluate()
        return row | self.totals()

    def evaluate(self) -> Row:
        """Return the metrics of the current model."""
        metrics: Row = {}
        if self.settings.test is not None:
            metrics |= self.test_metrics(self.state.params)
        if self.settings.evaluate is not None:
            metrics |= self.settings.evaluate(self.state.params)
        return metrics

    def title(self) -> str:
        """Return the name of the current round in the log."""
        return f"[ROUND {self.progress.round + 1}/{self.settings.rounds}]"

    def log_start(self) -> None:
        """Log what is trained, and the metrics of the model before the first round.

        So an evaluation with an error fails before any client has worked.
        """
        settings, size = self.settings, f"{tree.size(self.state.params):,} parameters"
        log.info("Training with %s: %s", self.name, ", ".join(_shown(self.hyper._asdict())))
        log.info("\t├── Rounds: %d, of %d clients each", settings.rounds, settings.cohort)
        log.info("\t├── Directory: %s", settings.directory or "none, nothing is saved")
        log.info("\t└── Model: %s", ", ".join([size, *_shown(self.evaluate())]))

    def log_round(self, row: Row, seconds: float) -> None:
        """Log the last round in one line."""
        name = f"[ROUND {self.progress.round}/{self.settings.rounds}]"
        hidden = {"round", *simulate.TOTALS}
        metrics = _shown({key: value for key, value in row.items() if key not in hidden})
        log.info("%s %s, %.1f s", name, ", ".join([*metrics, self.outcome]), seconds)

    def summary(self) -> dict[str, Any]:
        """Return what `summary.json` contains."""
        return {
            "algorithm": self.name,
            "rounds": self.progress.round,
            "clients": len(self.transport.clients),
            "events": self.progress.events,
            "events_by_client": self.progress.events_by_client,
            **self.totals(),
        }

    def totals(self) -> dict[str, int]:
        """Return the bytes sent so far, and the uploads and rounds that did not count."""
        return {name: getattr(self.progress, name) for name in simulate.TOTALS}


def _shown(values: Mapping[str, Any]) -> list[str]:
    """Return numbers with their names for the log. A missing training loss is left out."""
    return [f"{name} {float(value):.4g}" for name, value in values.items() if value is not None]


_send = jax.jit(lambda phase, hp, state: phase.send(hp, state), static_argnums=0)
_merge = jax.jit(merged, static_argnums=0)
_all_finite = jax.jit(tree.all_finite)
