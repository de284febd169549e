"""The round in Flower's simulation on Ray: `peer_flower.py PROBLEM ACTORS`, of one core each.

Its server app is the loop that answers the driver, so one simulation stays alive during all rounds.
"""

# Checked alike whether the packages are installed or not.
# mypy: disable-error-code="import-not-found, untyped-decorator"

import os
import sys
from functools import cache
from typing import Any

import nets
import protocol
import torch
import torch.nn.functional as F  # noqa: N812
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from protocol import Problem, Weights

PROBLEM = "PEER_FLOWER_PROBLEM"  # how the actors, which are processes of Ray, get to know it
client_app = ClientApp()


@cache
def loaded() -> tuple[Problem, Any, Any, Any]:
    """Once in every actor."""
    problem = protocol.load(os.environ[PROBLEM])
    return (
        problem,
        nets.build(problem),
        nets.tensors(problem.x, problem.y),
        nets.tensors(problem.check_x, problem.check_y),
    )


@client_app.train()
def train(message: Message, context: Context) -> Message:
    problem, model, (x, y), (check_x, check_y) = loaded()
    config = message.content["config"]
    if "position" in config:
        x, y = check_x[config["position"]], check_y[config["position"]]
        order = torch.arange(len(y))
    else:
        client = int(context.node_config["partition-id"])
        x, y = x[client], y[client]
        order = torch.randperm(len(y))
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(model.parameters(), problem.rate)
    for rows in order.split(problem.batch):
        optimizer.zero_grad()
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    content = {
        "arrays": ArrayRecord(model.state_dict()),
        "metrics": MetricRecord({"num-examples": len(y)}),
    }
    return Message(RecordDict(content), reply_to=message)


def main() -> None:
    driver = protocol.Driver()
    os.environ[PROBLEM] = sys.argv[1]
    actors = int(sys.argv[2])
    os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    from flwr.simulation import run_simulation

    problem, model, (x, _), (check_x, check_y) = loaded()
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        strategy = FedAvg(
            fraction_train=problem.cohort / len(x),
            fraction_evaluate=0.0,
            min_train_nodes=problem.cohort,
            min_available_nodes=len(x),
        )
        state = {"arrays": ArrayRecord(model.state_dict())}

        def rounds(number: int) -> None:
            result = strategy.start(grid, state["arrays"], num_rounds=number)
            state["arrays"] = result.arrays

        def install() -> None:
            model.load_state_dict(state["arrays"].to_torch_state_dict())

        def loss() -> float:
            install()
            with torch.no_grad():
                return float(F.cross_entropy(model(torch.cat(check_x)), torch.cat(check_y)))

        def check() -> Weights:
            nodes = sorted(grid.get_node_ids())[: problem.cohort]
            messages = [
                Message(
                    RecordDict(
                        {"arrays": state["arrays"], "config": ConfigRecord({"position": place})}
                    ),
                    node,
                    "train",
                )
                for place, node in enumerate(nodes)
            ]
            arrays, _ = strategy.aggregate_train(1, grid.send_and_receive(messages))
            state["arrays"] = arrays
            install()
            return nets.extract(model, problem)

        driver.serve(problem, loss, check, rounds, packages=["flwr", "ray", "torch"])

    run_simulation(
        server_app,
        client_app,
        num_supernodes=len(x),
        backend_config={
            "init_args": {"num_cpus": actors, "num_gpus": 0},
            "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    import peer_flower  # so that the actors find the client app by the name of this module

    peer_flower.main()
