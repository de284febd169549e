"""Hostile replies to a Flower server: it goes on, its state stays finite, and none of them is run.

Nothing is mocked but the network. Without honest clients, the server may end with a message.
"""

import io
import logging
import pickle
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from fedda.errors import InputError
from fedda.flower import client_app, serve
from fedda.flower.messages import Order
from helpers.flower_grid import LocalGrid
from helpers.flower_problem import ROUNDS, TASK, changed, examples, settings, with_arrays

ALGORITHMS = ("fedavg", "fedda-adam", "scaffold", "mime-sgdm")
NUMBERS = [np.nan, np.inf, -np.inf, 1e38, -1e38, 1e30, 1e15, 0.0, -1.0, 1e-45]


class Executed:
    """Leaves a file when it is unpickled."""

    path = ""

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


def raw(array: Array, data: bytes, draw: random.Random) -> Array:
    dtype = draw.choice([array.dtype, array.dtype, "object", "float16", "<M8[s]", ""])
    shape = draw.choice([tuple(array.shape)] * 3 + [(), (0,), (10**9,), (-1,)])
    return Array(dtype, shape, draw.choice([array.stype, "numpy.ndarray", "x"]), data)


def damaged(data: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(data))
    ways = [data[:place], data[:place] + draw.randbytes(4) + data[place + 4 :], data + bytes(10**5)]
    ways += [draw.randbytes(80), b"", pickle.dumps(Executed()), b"PK\x03\x04" + data]
    return draw.choice(ways)


def zipped(value: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.savez(file, value)
    return file.getvalue()


def spoil_arrays(reply: Message, draw: random.Random) -> Message:
    """Change some arrays, each in its own way."""
    share = draw.choice([0.2, 1.0])
    number = draw.choice(NUMBERS)

    def change(array: Array) -> Array:
        if draw.random() > share:
            return array
        value = np.asarray(array.numpy())
        way = draw.randrange(8)
        with np.errstate(all="ignore"):
            if way == 0:
                return Array(np.asarray(value * number, value.dtype))
            if way == 1:
                return Array(np.full_like(value, number))
            if way == 2:
                one = value.copy().reshape(-1)
                one[draw.randrange(one.size)] = number
                return Array(one.reshape(value.shape))
        if way == 3:
            return Array(np.asarray(value, draw.choice(["f2", "i4", "i8", "?", "c16", "U3"])))
        if way == 4:
            return Array(np.zeros(draw.choice([(), (0,), (1, 1), (5,)]), value.dtype))
        if way == 5:
            return raw(array, zipped(value), draw)
        return raw(array, damaged(array.data, draw), draw)

    return with_arrays(reply, change)


def spoil_records(reply: Message, draw: random.Random) -> Message:
    """Change what a reply says besides its arrays."""
    arrays = dict(reply.content["upload"])
    order = dict(reply.content["fedda"])
    seen = {"loss": draw.choice(NUMBERS), "examples": draw.choice(NUMBERS)}
    ways: list[Callable[[], Message]] = [
        lambda: changed(reply, upload=ArrayRecord()),
        lambda: changed(reply, upload=ArrayRecord(dict(list(arrays.items())[1:]))),
        lambda: changed(reply, upload=ArrayRecord(arrays | {"../x": Array(np.zeros(3))})),
        lambda: changed(reply, upload=ArrayRecord({f"\n{k}": v for k, v in arrays.items()})),
        lambda: changed(reply, upload=ConfigRecord({"w": 1})),
        lambda: changed(reply, fedda=ConfigRecord(order | {"serial": order["serial"] - 1})),
        lambda: changed(reply, fedda=ConfigRecord(order | {"partition": draw.randrange(-1, 9)})),
        lambda: changed(
            reply, fedda=ConfigRecord(order | {"serial": draw.choice(["1", 1.0, [1]])})
        ),
        lambda: changed(reply, fedda=ConfigRecord({"x" * 1000: "y" * 10_000})),
        lambda: changed(reply, seen=MetricRecord(seen)),
        lambda: changed(reply, seen=MetricRecord({"loss": [1.0, 2.0]})),
        lambda: changed(reply, seen=ArrayRecord({"loss": Array(np.zeros(2))})),
        lambda: Message(metadata=reply.metadata, content=RecordDict()),
        lambda: Message(metadata=reply.metadata, content=RecordDict({"fedda": MetricRecord({})})),
    ]
    return draw.choice(ways)()


class Liar:
    """A node that answers each order with a spoilt upload, without any work."""

    def __init__(self, partition: int, draw: random.Random) -> None:
        self.partition, self.draw, self.sent = partition, draw, 0

    def __call__(self, message: Message, context: Context) -> Message:
        if message.metadata.message_type != "train":
            return app(message, context)
        order = Order.read(message.content)
        key = order.algorithm, order.phase
        if key not in uploads:
            uploads[key] = app(message, context).content
        content = RecordDict(dict(uploads[key]) | {"fedda": order.reply(self.partition)})
        change = self.draw.choice([spoil_arrays, spoil_arrays, spoil_records])
        self.sent += 1
        return change(Message(content, reply_to=message), self.draw)


app = client_app(TASK, lambda context: examples(int(context.node_config["partition-id"]) % 4))
uploads: dict[tuple[str, int], RecordDict] = {}  # of the honest, by algorithm and phase


def prepare(folder: Path, name: str) -> Callable[[int], Counter[str]]:
    Executed.path = str(folder / "executed")
    logging.disable(logging.WARNING)

    def attempt(seed: int) -> Counter[str]:
        draw = random.Random(seed)
        algorithm, honest = ALGORITHMS[seed % len(ALGORITHMS)], draw.choice([0, 1, 3, 8])
        liars = [Liar(honest + number, draw) for number in range(draw.choice([1, 8, 24]))]
        nodes = honest + len(liars)
        given = settings(algorithm, nodes=nodes, cohort=nodes, deadline=30.0)
        try:
            served = serve(LocalGrid([app] * honest + liars, twice(draw)), given)
        except InputError as error:
            if honest or not re.search("no client can train|rounds were skipped", str(error)):
                raise AssertionError("the honest can train") from error
        else:
            assert [row["round"] for row in served.history] == list(range(1, ROUNDS + 1))
            assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(served.state))
            honest_names = {f"client {number} (node {100 + number})" for number in range(honest)}
            refused = {
                key for key, own in served.events_by_client.items() if "refused_replies" in own
            }
            if honest > len(liars):  # else the median is theirs
                assert not refused & honest_names, "an honest client was refused"
        assert not (folder / "executed").exists(), "code of a reply was run"
        return Counter(replies=sum(liar.sent for liar in liars))

    return attempt


def twice(draw: random.Random) -> Any:
    """Let some replies arrive a second time."""
    return lambda partition, message, reply: [reply] * draw.choice([1] * 19 + [2])
