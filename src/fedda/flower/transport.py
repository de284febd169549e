"""The server's end of Flower's grid: who is there, what is sent to them, and what comes back."""

import time
from collections.abc import Iterator, Mapping

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedda.errors import InputError
from fedda.flower import messages as wire
from fedda.flower.messages import Refused
from fedda.flower.state import Progress

PAUSE = 0.2  # seconds between two looks at what has come in: each is work for the SuperLink


class Mail:
    """Messages to clients and their replies, none of which is waited for beyond the deadline."""

    def __init__(self, grid: Grid, deadline: float, progress: Progress) -> None:
        self.grid, self.deadline, self.progress = grid, deadline, progress
        self.clients: dict[int, int] = {}  # the node of each, by its partition
        self.strangers: set[int] = set()  # nodes that gave no usable answer to what they are
        self.doubles: set[int] = set()  # those of them whose partition had a node already
        self.late: dict[str, int] = {}  # messages whose time is over, and whom they asked

    def gather(self, least: int) -> None:
        """Waits for so many clients with examples."""
        end = time.monotonic() + self.deadline
        while True:
            self.discover()
            if len(self.clients) >= least:
                return
            if time.monotonic() > end:
                count = len(self.strangers)
                refused = f" Nodes that are no clients, the log says why: {count}." if count else ""
                raise InputError(
                    f"{least} clients are needed, and {len(self.clients)} have come in "
                    f"{self.deadline:g} s.{refused} Start more nodes, or lower nodes, cohort or "
                    "least."
                )
            time.sleep(PAUSE)

    def discover(self) -> None:
        """Asks the nodes that are new who they are, and forgets those that have gone."""
        nodes = set(self.grid.get_node_ids())
        known = len(self.clients)
        self.clients = {key: node for key, node in self.clients.items() if node in nodes}
        if len(self.clients) < known:  # whoever came in place of one that has gone may be asked now
            self.strangers -= self.doubles
            self.doubles.clear()
        self.strangers &= nodes
        new = nodes - set(self.clients.values()) - self.strangers
        ids = self.push({node: self.message(RecordDict(), "query", node) for node in sorted(new)})
        self.strangers |= new  # until they have answered: one that is silent is waited for but once
        for node, reply in self.pull(ids):
            try:
                about = wire.read(wire.content(reply), "fedda", partition=int, has_examples=bool)
                if about["partition"] in self.clients:
                    self.doubles.add(node)
                    raise Refused(
                        f"partition {about['partition']} has a node already. Give each node a "
                        "partition-id of its own."
                    )
                if not about["has_examples"]:
                    raise Refused("it has no examples")
            except Refused as reason:
                self.progress.event("refused_nodes", "node %d: %s", node, reason)
                continue
            self.strangers.remove(node)
            self.clients[about["partition"]] = node

    def ask(self, messages: Mapping[int, Message]) -> Iterator[tuple[int, Message]]:
        """Sends messages to clients, and gives the replies of those that reply; counts bytes."""
        for message in messages.values():
            self.progress.bytes_down += wire.nbytes(message.content)
        for partition, reply in self.pull(self.push(messages)):
            if reply.has_content():
                self.progress.bytes_up += wire.nbytes(reply.content)
            yield partition, reply

    def message(self, content: RecordDict, kind: str, node: int) -> Message:
        """A message to a node, which nobody delivers after the deadline."""
        group = str(self.progress.round)
        return Message(content, node, kind, ttl=self.deadline, group_id=group)

    def push(self, messages: Mapping[int, Message]) -> dict[str, int]:
        """Sends messages to whom they are for; their ids, with the same."""
        ids = list(self.grid.push_messages(list(messages.values())))
        return {name: key for name, key in zip(ids, messages, strict=True) if name}

    def pull(self, waiting: dict[str, int]) -> Iterator[tuple[int, Message]]:
        """A reply from each that was asked, as they come; what misses the deadline is late."""
        end = time.monotonic() + self.deadline
        event, answered = self.progress.event, set[str]()
        while len(answered) < len(waiting) and time.monotonic() < end:
            open_ids = [name for name in waiting if name not in answered]
            for reply in self.grid.pull_messages([*open_ids, *self.late]):
                name = reply.metadata.reply_to_message_id
                if name in self.late:
                    event("late_replies", "client %d: too late", self.late.pop(name))
                elif name in answered or name not in waiting:
                    event("repeated_replies", "a reply to %s came again", name)
                else:
                    answered.add(name)
                    yield waiting[name], reply
            if len(answered) < len(waiting):
                time.sleep(PAUSE)
        for name in waiting.keys() - answered:
            event("missing_replies", "client or node %d has not replied", waiting[name])
            self.late[name] = waiting[name]
