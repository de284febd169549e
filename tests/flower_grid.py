"""A Flower grid whose nodes are in this process: messages are what they are, nothing is mocked."""

import time
from collections.abc import Callable, Iterable
from itertools import count

from flwr.app import Context, Error, Message, Metadata, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

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

    def create_message(self, content, message_type, dst_node_id, group_id, ttl=None):
        metadata = Metadata(
            1, "", 1, dst_node_id, "", group_id, time.time(), ttl or 60, message_type
        )
        return Message(metadata=metadata, content=content)

    def get_node_ids(self):
        return list(self.apps)

    def push_messages(self, messages):
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
