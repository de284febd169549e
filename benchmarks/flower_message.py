"""Measure what a Flower node spends on one message: a process that starts, trains and replies.

    python benchmarks/flower_message.py [REPETITIONS]

Flower starts a process for each message. Here, each process imports a client app, trains the same
small network on the same digits for one epoch, and writes its reply. The client apps take turns.
Compiled programs are on disk, as after the first message. PyTorch has one thread.
"""

import json
import os
import pickle
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

BATCH, RATE, NODES, ALGORITHM = 20, 0.1, 3, "fedda-adam"


def examples() -> Any:
    """Return the digits of one node."""
    from fedda.data import digits

    data = digits.load()
    x = data.train_x[::NODES].transpose(0, 3, 1, 2).astype("float32") / 16
    return x, data.train_y[::NODES].astype("int64")


def network() -> Any:
    """Return the module of `examples/flower-pytorch`."""
    from torch import nn

    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(8 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def loader(_: Any = None) -> Any:
    """Return batches of the node's digits."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    data = TensorDataset(*map(torch.from_numpy, examples()))
    return DataLoader(data, BATCH, shuffle=True)


def own_loop(make_optimizer: Any, reply: Any) -> Any:
    """Return a client app with a training loop of its own."""
    from flwr.app import Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from torch import nn

    app = ClientApp()

    @app.train()
    def train(message: Any, context: Any) -> Any:
        module, criterion = network(), nn.CrossEntropyLoss()
        module.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimizer, batches = make_optimizer(module.parameters(), lr=RATE), loader()
        for x, y in batches:
            optimizer.zero_grad()
            criterion(module(x), y).backward()
            optimizer.step()
        metrics = MetricRecord({"num-examples": len(batches.dataset)})
        content = {"arrays": reply(module, optimizer), "metrics": metrics}
        return Message(RecordDict(content), reply_to=message)

    return app


def only_flower() -> Any:
    """Return an app that imports Flower, and answers without training."""
    from flwr.app import Message, RecordDict
    from flwr.clientapp import ClientApp

    app = ClientApp()
    app.train()(lambda message, context: Message(RecordDict(), reply_to=message))
    return app


def flower_fedavg() -> Any:
    """Return Flower's own FedAvg with PyTorch."""
    import torch
    from flwr.app import ArrayRecord

    return own_loop(torch.optim.SGD, lambda module, _: ArrayRecord(module.state_dict()))


def flower_fedavg_and_jax() -> Any:
    """Return the same app, which also imports JAX: the least that a client with both needs."""
    import jax  # noqa: F401

    return flower_fedavg()


def fedda_strategy() -> Any:
    """Return the same app for the strategy `fedda.flower.FedDA`."""
    from fedda.torch import DecoupledSGD, reply_arrays

    return own_loop(DecoupledSGD, reply_arrays)


def torch_client() -> Any:
    """Return `fedda.torch.client_app`."""
    from torch.nn.functional import cross_entropy

    import fedda.torch

    return fedda.torch.client_app(network(), cross_entropy, loader, 1, "epochs")


def model_task(model: Any) -> Any:
    """Return the task of the clients of JAX."""
    from fedda.flower import task

    return task(model, "cross_entropy", batch=BATCH, local_work=1, local_unit="epochs")


def jax_client(model: Any) -> Any:
    """Return `fedda.flower.client_app` with a model."""
    from fedda.flower import client_app

    return client_app(model_task(model), lambda _: examples())


def perceptron() -> Any:
    """Return a model in JAX of the same size."""
    from fedda import models

    return models.mlp(64, 64, 10)


APPS: Mapping[str, Callable[[], Any]] = {
    "Flower alone, no training": only_flower,
    "Flower's FedAvg, PyTorch": flower_fedavg,
    "Flower's FedAvg, PyTorch, and `import jax`": flower_fedavg_and_jax,
    "strategy `fedda.flower.FedDA`, PyTorch": fedda_strategy,
    "`fedda.torch.client_app`": torch_client,
    "`fedda.flower.client_app`, JAX model": lambda: jax_client(perceptron()),
    "`fedda.flower.client_app`, PyTorch module": lambda: jax_client(network()),
}


def content(name: str) -> Any:
    """Return the content of the server's message to an app."""
    from flwr.app import ArrayRecord, ConfigRecord, RecordDict

    if "client_app" not in name:
        arrays = ArrayRecord(network().state_dict())
        return RecordDict({"arrays": arrays, "config": ConfigRecord({"server-round": 1})})
    import jax

    from fedda import algorithms, api
    from fedda.flower.messages import Order, pack
    from fedda.torch import model

    of_torch = model(network()) if "torch" in name else None
    own = perceptron() if "JAX" in name else network()
    record, values = algorithms.configure(ALGORITHM, {})
    task_model = of_torch or model_task(own).model
    state = record.init(api.traced(values, task_model), task_model.init(jax.random.key(0)))
    options = {key: choices[0] for key, choices in algorithms.options(ALGORITHM).items()}
    order = Order(
        *(ALGORITHM, json.dumps(options), 0, 0, 0, False, NODES, 1, 0, 0),
        hyper=values._asdict(),
    )
    sent = pack(record.phases[0].send(api.traced(values, task_model), state))
    return RecordDict({**order.records(), "message": sent})


def answer(name: str, path: Path) -> None:
    """Answer one message, as a process of a node does."""
    from flwr.app import Context, Message, RecordDict
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    app = APPS[name]()
    asked = Message(pickle.loads(path.read_bytes()), 1, "train", ttl=60, group_id="0")
    context = Context(1, 1, {"partition-id": 0, "num-partitions": NODES}, RecordDict(), {})
    reply = app(asked, context)
    assert not reply.has_error()
    path.with_suffix(".reply").write_bytes(pickle.dumps(reply.content))


def measure(repetitions: int) -> dict[str, list[tuple[float, float]]]:
    """Return the CPU seconds and the seconds of each message of each app."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"FEDDA_COMPILE_CACHE": f"{folder}/compiled"}
        environment["OMP_NUM_THREADS"] = "1"  # PyTorch's threads wait in loops
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in APPS}
        for repetition in range(-1, repetitions):  # the first compiles
            for number, name in enumerate(APPS):
                path = Path(folder) / str(number)
                if repetition < 0:
                    run(name, path, "content", environment)
                spent = run(name, path, "answer", environment)
                if repetition >= 0:
                    seconds[name].append(spent)
    return seconds


def run(name: str, path: Path, what: str, environment: dict[str, str]) -> tuple[float, float]:
    """Run one process, and return its CPU seconds and its seconds."""
    started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, __file__, what, name, str(path)]
    subprocess.run(command, check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.perf_counter() - started


def main() -> None:
    if sys.argv[1:2] == ["content"]:
        Path(sys.argv[3]).write_bytes(pickle.dumps(content(sys.argv[2])))
        return
    if sys.argv[1:2] == ["answer"]:
        answer(sys.argv[2], Path(sys.argv[3]))
        return
    from fedda.reports.tables import markdown_table

    found = measure(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
    base = statistics.median(cpu for cpu, _ in found["Flower's FedAvg, PyTorch"])
    rows = [["client", "CPU seconds", "shortest", "more than Flower's FedAvg", "seconds"]]
    for name, spent in found.items():
        cpus, walls = zip(*spent, strict=True)
        middle = statistics.median(cpus)
        numbers = (middle, min(cpus), middle - base, statistics.median(walls))
        rows.append([name, *(f"{number:.2f}" for number in numbers)])
    print(markdown_table(rows))


if __name__ == "__main__":
    main()
