"""A Flower grid whose nodes are in this process: messages are what they are, nothing is mocked."""

from collections.abc import Callable, Iterable
from itertools import count

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

# Flower lets no process make messages that is not a server's or a client's.
TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

Spoil = Callable[[int, Message, Message], Iterable[Message]]


class LocalGrid(Grid):
    """Nodes with an app each; `spoil(partition, message, reply)` gives what arrives instead."""

    def __init__(self, apps: Iterable[ClientApp], spoil: Spoil | None = None) -> None:
        self.apps = dict(enumerate(apps, start=100))  # by node id
        self.contexts = {
            node: Context(1, node, {"partition-id": node - 100}, RecordDict(), {})
            for node in self.apps
        }
        self.spoil, self.ids = spoil, count()
        self.arrived: list[Message] = []
        self.sent: list[Message] = []

    def set_run(self, run) -> None: ...

    @property
    def run(self): ...

    def create_message(self, *_): ...

    def get_node_ids(self):
        return list(self.apps)

    def push_messages(self, messages):
        assert isinstance(messages, list), "Flower goes through the messages twice"
        ids = []
        for message in messages:
            node, name = message.metadata.dst_node_id, str(next(self.ids))
            message.metadata.__dict__["_message_id"] = name
            self.sent.append(message)
            try:
                reply = self.apps[node](message, self.contexts[node])
            except Exception as error:
                reply = Message(Error(2, str(error)), reply_to=message)
            spoilt = message.metadata.message_type == "train" and self.spoil
            arriving = self.spoil(node - 100, message, reply) if spoilt else [reply]
            self.arrived += arriving
            ids.append(name)
        return ids

    def pull_messages(self, message_ids):
        wanted = set(message_ids)
        here = [one for one in self.arrived if one.metadata.reply_to_message_id in wanted]
        self.arrived = [one for one in self.arrived if one not in here]
        return here

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(messages))
