"""The round as a loop over clients by hand, eager: `peer_torch_loop.py PROBLEM PROCESSES`.

With one process, PyTorch uses all cores for each operation; with more, each process has one thread
and its share of the cohort, and the weights are in shared memory.
"""

# Checked alike whether the packages are installed or not.
# mypy: disable-error-code="import-not-found, no-untyped-call"

import sys
from collections.abc import Iterable
from typing import Any

import nets
import protocol
import torch
import torch.nn.functional as F  # noqa: N812
from protocol import Problem, Weights
from torch import Tensor, multiprocessing

Tensors = list[Tensor]
Batch = tuple[Tensor, Tensor]


class Clients:
    """Trains one client after another, and adds up what they upload."""

    def __init__(self, problem: Problem, device: str) -> None:
        self.problem = problem
        self.device = device
        self.x, self.y = nets.tensors(problem.x, problem.y, device)
        self.check_x, self.check_y = nets.tensors(problem.check_x, problem.check_y, device)
        self.model = nets.build(problem).to(device)
        self.params: Tensors = list(self.model.parameters())
        # Kernels decay and the bias of the last layer does, norms do not.
        self.decaying = [
            number
            for number, (name, param) in enumerate(self.model.named_parameters())
            if param.ndim > 1 or name == "out.bias"
        ]

    def shuffled(self, client: int) -> Iterable[Batch]:
        x, y = self.x[client], self.y[client]
        order = torch.randperm(len(y), device=self.device)
        for rows in order.split(self.problem.batch):
            yield x[rows], y[rows]

    def checked(self, position: int) -> Iterable[Batch]:
        size = self.problem.batch
        x, y = self.check_x[position], self.check_y[position]
        return zip(x.split(size), y.split(size), strict=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        half = self.problem.precision == "bf16"
        with torch.autocast(self.device, torch.bfloat16, enabled=half):
            return F.cross_entropy(self.model(x), y)

    def gradients(self, x: Tensor, y: Tensor) -> Tensors:
        found = list(torch.autograd.grad(self.loss(x, y), self.params))
        if self.problem.l2:
            torch._foreach_add_(
                [found[i] for i in self.decaying],
                [self.params[i].detach() for i in self.decaying],
                alpha=2 * self.problem.l2,
            )
        return found

    def work(self, server: Tensors, total: Tensors, everyone: Iterable[Iterable[Batch]]) -> None:
        """Adds each client's upload to `total`: where its SGD ends, or P and m of FedDA.

        An upload has the weight of the client's examples, and the last of `total` is their number.
        """
        size = len(self.params)
        for batches in everyone:
            with torch.no_grad():
                torch._foreach_copy_(self.params, server[:size])
            m = [each.clone() for each in server[size:]]
            P = [torch.zeros_like(each) for each in m]
            examples = 0
            for x, y in batches:
                examples += len(y)
                g = self.gradients(x, y)
                with torch.no_grad():
                    torch._foreach_add_(self.params, g, alpha=-self.problem.rate)
                    if m:
                        torch._foreach_lerp_(m, g, 1 - self.problem.beta1)
                        torch._foreach_add_(P, m)
            with torch.no_grad():
                torch._foreach_add_(total[:-1], [*P, *m] if m else self.params, alpha=examples)
                total[-1] += examples


def server_start(problem: Problem, params: Tensors) -> Tensors:
    """The weights, and for FedDA the momentum."""
    weights = [param.detach().clone() for param in params]
    return weights + (
        [torch.zeros_like(each) for each in weights] if problem.algorithm == "fedda-sgdm" else []
    )


def merge(problem: Problem, server: Tensors, totals: list[Tensors]) -> None:
    """The mean over the cohort. Empties the totals."""
    for total in totals[1:]:
        torch._foreach_add_(totals[0], total)
    torch._foreach_div_(totals[0][:-1], float(totals[0][-1]))
    if problem.algorithm == "fedda-sgdm":
        size = len(server) // 2
        torch._foreach_add_(server[:size], totals[0][:size], alpha=-problem.rate)
        torch._foreach_copy_(server[size:], totals[0][size:-1])
    else:
        torch._foreach_copy_(server, totals[0][:-1])
    for total in totals:
        torch._foreach_zero_(total)


def helper(path: str, server: Tensors, total: Tensors, pipe: Any) -> None:
    """A process that trains the clients that it receives, until it receives none."""
    torch.set_num_threads(1)
    clients = Clients(protocol.load(path), "cpu")
    while (told := pipe.recv()) is not None:
        kind, numbers = told
        clients.work(server, total, [getattr(clients, kind)(number) for number in numbers])
        pipe.send("done")


def main() -> None:
    driver = protocol.Driver()
    path, processes = sys.argv[1], int(sys.argv[2])
    problem = protocol.load(path)
    device = "cuda" if torch.cuda.is_available() and processes == 1 else "cpu"
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as XLA does there
    clients = Clients(problem, device)
    server = server_start(problem, clients.params)
    totals = [
        [*(torch.zeros_like(each) for each in server), torch.zeros((), device=device)]
        for _ in range(processes)
    ]
    pipes = []
    if processes > 1:
        torch.set_num_threads(1)
        for each in (*server, *(tensor for total in totals for tensor in total)):
            each.share_memory_()
        spawn = multiprocessing.get_context("spawn")
        for total in totals[1:]:
            here, there = spawn.Pipe()
            spawn.Process(target=helper, args=(path, server, total, there), daemon=True).start()
            pipes.append(here)

    def one_round(kind: str, numbers: list[int]) -> None:
        """Each process has every so manieth client of the cohort, the largest first."""
        sizes = clients.check_y if kind == "checked" else clients.y
        numbers = sorted(numbers, key=lambda number: -len(sizes[number]))
        for place, pipe in enumerate(pipes, 1):
            pipe.send((kind, numbers[place::processes]))
        mine = numbers[::processes]
        clients.work(server, totals[0], [getattr(clients, kind)(number) for number in mine])
        for pipe in pipes:
            pipe.recv()
        merge(problem, server, totals)

    def rounds(number: int) -> None:
        for _ in range(number):
            one_round("shuffled", torch.randperm(len(problem.x))[: problem.cohort].tolist())
        if device == "cuda":
            torch.cuda.synchronize()

    def install() -> None:
        with torch.no_grad():
            torch._foreach_copy_(clients.params, server[: len(clients.params)])

    def loss() -> float:
        install()
        x, y = torch.cat(clients.check_x), torch.cat(clients.check_y)
        with torch.no_grad():
            return float(clients.loss(x, y))

    def check() -> Weights:
        one_round("checked", list(range(problem.cohort)))
        install()
        return nets.extract(clients.model, problem)

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    driver.serve(problem, loss, check, rounds, packages=["torch", "numpy"], device=name)
    for pipe in pipes:
        pipe.send(None)


if __name__ == "__main__":
    main()
