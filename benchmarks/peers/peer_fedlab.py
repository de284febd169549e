"""The round in FedLab, its standalone pipeline: `peer_fedlab.py PROBLEM`."""

# Checked alike whether the packages are installed or not.
# mypy: disable-error-code="import-not-found, misc, no-untyped-call"

import logging
import sys
from collections.abc import Iterable
from unittest.mock import MagicMock

# FedLab imports this for data sets that are not used here, and the package index has no build of it
# for a PyTorch without CUDA.
sys.modules["torchvision"] = MagicMock()

import nets  # noqa: E402
import protocol  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402, N812
from fedlab.contrib.algorithm.fedavg import (  # noqa: E402
    FedAvgSerialClientTrainer,
    FedAvgServerHandler,
)
from fedlab.core.standalone import StandalonePipeline  # noqa: E402
from protocol import Weights  # noqa: E402
from torch import Tensor  # noqa: E402


class Shuffled:
    """What the trainer asks for a client's batches: rows of tensors, faster than a DataLoader."""

    def __init__(self, x: list[Tensor], y: list[Tensor]) -> None:
        self.x, self.y = x, y

    def get_dataloader(self, client: int, batch: int) -> Iterable[tuple[Tensor, Tensor]]:
        x, y = self.x[client], self.y[client]
        for rows in torch.randperm(len(y)).split(batch):
            yield x[rows], y[rows]


class InOrder(Shuffled):
    def get_dataloader(self, client: int, batch: int) -> Iterable[tuple[Tensor, Tensor]]:
        return zip(self.x[client].split(batch), self.y[client].split(batch), strict=True)


class Pipeline(StandalonePipeline):
    def evaluate(self) -> None:
        """Nothing is evaluated in the rounds that are timed."""


def main() -> None:
    driver = protocol.Driver()
    problem = protocol.load(sys.argv[1])
    model = nets.build(problem)
    check_x, check_y = nets.tensors(problem.check_x, problem.check_y)

    def pipeline(model: torch.nn.Module, clients: int, dataset: Shuffled) -> Pipeline:
        trainer = FedAvgSerialClientTrainer(model, clients)
        trainer.setup_dataset(dataset)
        trainer.setup_optim(epochs=1, batch_size=problem.batch, lr=problem.rate)
        handler = FedAvgServerHandler(model, global_round=0, sample_ratio=problem.cohort / clients)
        return Pipeline(handler, trainer)

    checked = pipeline(model, problem.cohort, InOrder(check_x, check_y))
    timed = pipeline(model, len(problem.x), Shuffled(*nets.tensors(problem.x, problem.y)))

    def run(pipeline: Pipeline, number: int) -> None:
        pipeline.handler.global_round += number
        pipeline.main()

    def loss() -> float:
        with torch.no_grad():
            logits = checked.handler.model(torch.cat(check_x))
            return float(F.cross_entropy(logits, torch.cat(check_y)))

    def check() -> Weights:
        run(checked, 1)
        return nets.extract(checked.handler.model, problem)

    logging.disable(logging.INFO)
    driver.serve(
        problem, loss, check, lambda number: run(timed, number), packages=["fedlab", "torch"]
    )


if __name__ == "__main__":
    main()
