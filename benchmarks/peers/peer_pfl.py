"""The round in pfl-research, its simulated backend: `peer_pfl.py PROBLEM WORKERS`.

More than one worker are processes with one thread each, joined as pfl joins those of one machine.
The first starts the others and tells them what the driver tells it.
"""

# Checked alike whether the packages are installed or not.
# mypy: disable-error-code="import-not-found, misc, no-untyped-call"

import os
import socket
import subprocess
import sys
from typing import Any

import protocol

PROCESS = "PFL_WORKER_RANK"


def start_workers(count: int) -> list[subprocess.Popen[str]]:
    """Starts the other workers; must come before pfl is imported, which joins them."""
    if count == 1 or PROCESS in os.environ:
        return []
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    addresses = ",".join(f"127.0.0.1:{port}" for _ in range(count))
    os.environ |= {"PFL_WORKER_ADDRESSES": addresses, "OMP_NUM_THREADS": "1", PROCESS: "0"}
    return [
        subprocess.Popen(
            [sys.executable, *sys.argv],
            env=os.environ | {PROCESS: str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(1, count)
    ]


def main() -> None:
    driver = protocol.Driver()
    problem = protocol.load(sys.argv[1])
    workers = start_workers(int(sys.argv[2]))

    import nets
    import numpy as np
    import torch
    import torch.nn.functional as F  # noqa: N812
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByDatapoints
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data.dataset import Dataset
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.hyperparam import NNTrainHyperParams
    from pfl.metrics import Weighted
    from pfl.model.pytorch import PyTorchModel

    np.random.seed(0)  # the workers must draw the same cohorts
    x, y = nets.tensors(problem.x, problem.y)
    check_x, check_y = nets.tensors(problem.check_x, problem.check_y)

    class Network(torch.nn.Module):
        """What pfl asks of a model."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = nets.build(problem)

        def loss(self, x: Any, y: Any) -> Any:
            return F.cross_entropy(self.inner(x), y)

        def metrics(self, x: Any, y: Any) -> dict[str, Any]:
            return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}

    network = Network()
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )

    def shuffled(client: int) -> Dataset:
        rows = torch.randperm(len(y[client]))
        return Dataset((x[client][rows], y[client][rows]))

    def in_order(position: int) -> Dataset:
        return Dataset((check_x[position], check_y[position]))

    random = np.random.RandomState(0)
    waiting: list[int] = []

    def uniform() -> int:
        """The next client of a cohort that is drawn without replacement."""
        if not waiting:
            waiting.extend(random.choice(len(x), problem.cohort, replace=False).tolist())
        return waiting.pop()

    positions = iter(range(problem.cohort))
    timed = FederatedDataset(shuffled, uniform)
    checked = FederatedDataset(in_order, lambda: next(positions))
    algorithm = FederatedAveraging()
    done = 0  # the algorithm counts its iterations over all calls, and evaluates in the first

    def run(dataset: FederatedDataset, number: int) -> None:
        nonlocal done
        done += number
        algorithm.run(
            NNAlgorithmParams(
                central_num_iterations=done,
                evaluation_frequency=10**9,
                train_cohort_size=problem.cohort,
                val_cohort_size=0,
            ),
            SimulatedBackend(dataset, dataset, postprocessors=[WeightByDatapoints()]),
            model,
            NNTrainHyperParams(
                local_learning_rate=problem.rate,
                local_num_epochs=1,
                local_batch_size=problem.batch,
            ),
            send_metrics_to_platform=False,
        )

    def tell(line: str) -> None:
        for worker in workers:
            assert worker.stdin is not None
            print(line, file=worker.stdin, flush=True)

    def loss() -> float:
        with torch.no_grad():
            return float(network.loss(torch.cat(check_x), torch.cat(check_y)))

    def check() -> protocol.Weights:
        tell("check")
        run(checked, 1)
        return nets.extract(network.inner, problem)

    def rounds(number: int) -> None:
        tell(f"round {number}")
        run(timed, number)

    if os.environ.get(PROCESS, "0") != "0":
        for line in sys.stdin:
            if line.startswith("check"):
                run(checked, 1)
            else:
                run(timed, int(line.split()[1]))
        return
    driver.serve(problem, loss, check, rounds, packages=["pfl", "torch"])
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.close()
        worker.wait()


if __name__ == "__main__":
    main()
