"""Exchange of messages with the clients of a Flower grid, within a deadline."""

import time
from collections.abc import Iterator, Mapping

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedda.errors import InputError
from fedda.flower import messages
from fedda.flower.messages import MessageError, NotFiniteError, nbytes
from fedda.flower.state import Progress, log

PAUSE = 0.2  # seconds between two requests for replies, to limit the load of the SuperLink
GRACE = 30.0  # seconds in which another node may join, when all others have refused
SHOWN = 5  # the most reasons in an error; the log has all of them


class Transport:
    """The clients of a federation, and the messages to them.

    Attributes:
        clients: The Flower node of each client, by the client's partition number.
        faults: Why the last reply was refused, for each client whose last reply was refused.
    """

    def __init__(self, grid: Grid, algorithm: str, deadline: float, progress: Progress) -> None:
        self.grid, self.algorithm = grid, algorithm
        self.deadline, self.progress = deadline, progress
        self.clients: dict[int, int] = {}
        self.faults: dict[int, str] = {}
        self.refused: dict[int, str] = {}  # nodes that are no clients, and why; "": no answer yet
        self.newest = 0.0  # the time when the last new node was found
        self.duplicates: set[int] = set()  # refused because another node has their partition
        self.late: dict[str, int] = {}  # nodes by message, after the deadline of the message

    def wait_for_clients(self, count: int) -> None:
        """Wait until `count` clients with examples have joined.

        Raises:
            InputError: Too few clients joined before the deadline, or all nodes were refused.
        """
        end = time.monotonic() + self.deadline
        self.find_clients()
        if len(self.clients) < count:
            log.info("Waiting for %d clients, %d have joined", count, len(self.clients))
        while len(self.clients) < count:
            if self._is_hopeless(count):
                raise InputError(
                    f"{count} clients are needed, but all {len(self.refused)} nodes were refused:"
                    f"{listed('node', self.refused)}\nCorrect the clients or the settings, and "
                    "start the run again."
                )
            if time.monotonic() > end:
                joined = f"{len(self.clients)} joined within {self.deadline:g} s"
                raise InputError(
                    f"{count} clients are needed, but {joined}, and {len(self.refused)} nodes were "
                    f"refused. Start more nodes, or lower nodes, cohort or least."
                    f"{listed('node', self.refused)}"
                )
            time.sleep(PAUSE)
            self.find_clients()

    def _is_hopeless(self, count: int) -> bool:
        """Return whether all nodes have refused, no more are expected, and none ever took part."""
        if self.clients or self.progress.counted:
            return False
        answered = bool(self.refused) and all(self.refused.values())
        return answered and (len(self.refused) >= count or time.monotonic() > self.newest + GRACE)

    def find_clients(self) -> None:
        """Ask new nodes for their client number, and remove nodes that have left."""
        nodes = set(self.grid.get_node_ids())
        remaining = {key: node for key, node in self.clients.items() if node in nodes}
        if len(remaining) < len(self.clients):  # a duplicate may replace a node that has left
            for node in self.duplicates:
                self.refused.pop(node, None)
            self.duplicates.clear()
        self.clients = remaining
        self.refused = {node: why for node, why in self.refused.items() if node in nodes}
        new = nodes - set(self.clients.values()) - self.refused.keys()
        if new:
            self.newest = time.monotonic()
        # Until they answer, they are refused: the server waits for a silent node only once.
        self.refused |= dict.fromkeys(new, "")
        queries = {node: RecordDict() for node in sorted(new)}
        for node, reply in self._exchange(queries, {node: node for node in new}, "query"):
            try:
                content = messages.read_content(reply)
                expected: dict[str, type] = {"partition": int, "algorithms": list}
                client, supported = messages.read_config(content, "fedda", **expected).values()
                if self.algorithm not in supported:
                    raise MessageError(
                        f"the server trains {self.algorithm}, which this client does not support. "
                        "Change the algorithm of the server, or the client app. The client "
                        f"supports {', '.join(map(str, supported))}"
                    )
                if client in self.clients:
                    self.duplicates.add(node)
                    advice = "Give each node a different partition-id."
                    raise MessageError(f"partition {client} has a node already. {advice}")
            except MessageError as reason:
                self.refused[node] = str(reason)
                self.progress.event("refused_nodes", f"node {node}: {reason}")
            else:
                del self.refused[node]
                self.clients[client] = node

    def ask(self, contents: Mapping[int, RecordDict]) -> Iterator[tuple[int, Message]]:
        """Send each client its content, and yield the replies as they arrive.

        The bytes in both directions are added to the progress.
        """
        self.progress.bytes_down += sum(map(nbytes, contents.values()))
        for client in contents:
            self.faults.pop(client, None)
        for client, reply in self._exchange(contents, self.clients, "train"):
            if reply.has_content():
                self.progress.bytes_up += nbytes(reply.content)
            yield client, reply

    def _exchange(
        self, contents: Mapping[int, RecordDict], nodes: Mapping[int, int], message_type: str
    ) -> Iterator[tuple[int, Message]]:
        """Send each content to its node, and yield the first reply of each node in time."""
        group, event = str(self.progress.round + 1), self.progress.event
        ids = self.grid.push_messages(
            [  # a list, because Flower iterates over it twice
                Message(content, nodes[key], message_type, ttl=self.deadline, group_id=group)
                for key, content in contents.items()
            ]
        )
        waiting = {name: key for name, key in zip(ids, contents, strict=True) if name}
        end = time.monotonic() + self.deadline
        while waiting and time.monotonic() < end:
            for reply in self.grid.pull_messages([*waiting, *self.late]):
                name = reply.metadata.reply_to_message_id
                if name in waiting:
                    yield waiting.pop(name), reply
                elif name in self.late:
                    event("late_replies", f"node {self.late.pop(name)} replied too late")
                else:
                    event("repeated_replies", f"a second reply to message {name}")
            if waiting:
                time.sleep(PAUSE)
        for name, key in waiting.items():
            event("missing_replies", f"node {nodes[key]} has not replied")
            self.late[name] = nodes[key]

    def refuse(self, client: int, reason: MessageError) -> None:
        """Log and count a reply that is not used."""
        self.faults[client] = str(reason)
        self.progress.nonfinite_clients += isinstance(reason, NotFiniteError)
        self.note("refused_replies", client, reason)

    def note(self, event: str, client: int, reason: object) -> None:
        """Log and count an event for which one client is responsible."""
        name = f"client {client} (node {self.clients[client]})"
        self.progress.event(event, str(reason), client=name)


def listed(kind: str, reasons: Mapping[int, str]) -> str:
    """Return the first reasons, one per line. They belong to nodes or clients, as `kind` says."""
    lines = [f"\n  {kind} {key}: {why or 'no answer'}" for key, why in sorted(reasons.items())]
    return "".join(lines[:SHOWN]) + (f"\n  and {len(lines) - SHOWN} more" if lines[SHOWN:] else "")
