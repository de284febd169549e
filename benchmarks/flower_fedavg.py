"""Flower's own FedAvg on the problem of `examples/flower-digits`.

`flower_overhead.py` makes a Flower app of this file and of that problem, and measures its rounds.
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flower_digits.problem import TASK, share, test_set
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from jax import Array, lax, random

from fedda.core.losses import cross_entropy
from fedda.simulate.devices import start_up

RATE = 0.1

start_up()
server_app = ServerApp()
client_app = ClientApp()


def pack(params: Any) -> ArrayRecord:
    """Return parameters as a record of a message."""
    return ArrayRecord([np.asarray(leaf) for leaf in jax.tree.leaves(params)])


def unpack(arrays: ArrayRecord) -> Any:
    """Return the parameters in a record."""
    structure = jax.tree.structure(TASK.model.shapes())
    return jax.tree.unflatten(structure, arrays.to_numpy_ndarrays())


@jax.jit
def local_steps(params: Any, x: Array, y: Array, key: Array) -> Any:
    """Take as many SGD steps on as many examples as fedda's clients do."""

    def loss(params: Any, rows: Array) -> Array:
        return cross_entropy(TASK.model.apply(params, x[rows]), y[rows]).mean()

    def step(params: Any, rows: Array) -> tuple[Any, None]:
        gradient = jax.grad(loss)(params, rows)
        return jax.tree.map(lambda w, g: w - RATE * g, params, gradient), None

    size, amount, _ = TASK.plan
    order = random.permutation(key, len(y))[: amount * size]
    return lax.scan(step, params, order.reshape(amount, size))[0]


@jax.jit
def evaluate(params: Any, x: Array, y: Array) -> dict[str, Array]:
    """Return loss and metrics on these examples."""
    return TASK.evaluate(params, x, y)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Train on this client's share of the digits."""
    number = int(context.node_config["partition-id"])
    x, y = share(number, int(context.node_config["num-partitions"]))
    params = unpack(message.content.array_records["arrays"])
    config: Any = message.content.config_records["config"]
    key = random.fold_in(random.key(number), config["server-round"])
    content = RecordDict({"arrays": pack(local_steps(params, x, y, key))})
    content["metrics"] = MetricRecord({"num-examples": len(y)})
    return Message(content, reply_to=message)


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    """Run FedAvg, and log an evaluation of every round to `metrics.jsonl`."""
    config, test = context.run_config, test_set()
    folder = Path(str(config["out"]))
    folder.mkdir(parents=True)

    def measure(number: int, arrays: ArrayRecord) -> MetricRecord:
        metrics: dict[str, Any] = jax.tree.map(float, evaluate(unpack(arrays), *test))
        if number > 0:
            with open(folder / "metrics.jsonl", "a") as lines:
                lines.write(json.dumps({"round": number, **metrics}) + "\n")
        return MetricRecord(metrics)

    nodes = int(config["nodes"])
    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=nodes, min_available_nodes=nodes)
    start = jax.jit(TASK.model.init)(random.fold_in(random.key(0), 0))
    strategy.start(grid, pack(start), num_rounds=int(config["rounds"]), evaluate_fn=measure)
