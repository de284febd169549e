"""The round with the whole cohort at once, by `torch.func.vmap`: `peer_torch_vmap.py PROBLEM`."""

# Checked alike whether the packages are installed or not.
# mypy: disable-error-code="import-not-found, untyped-decorator"

import sys

import nets
import protocol
import torch
import torch.nn.functional as F  # noqa: N812
from protocol import Weights
from torch import Tensor
from torch.func import functional_call, grad, vmap

Params = dict[str, Tensor]


def main() -> None:
    driver = protocol.Driver()
    problem = protocol.load(sys.argv[1])
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.set_float32_matmul_precision("high")  # TF32, as XLA does there
    decoupled = problem.algorithm == "fedda-sgdm"
    x, y = map(torch.stack, nets.tensors(problem.x, problem.y, device))
    checked = map(torch.stack, nets.tensors(problem.check_x, problem.check_y, device))
    steps = (problem.steps, problem.batch)
    check_x, check_y = (each.unflatten(1, steps) for each in checked)
    model = nets.build(problem).to(device)
    server = {name: param.detach() for name, param in model.named_parameters()}
    momentum = {name: torch.zeros_like(param) for name, param in server.items()}

    def mean_loss(params: Params, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=problem.precision == "bf16"):
            return F.cross_entropy(functional_call(model, params, (x,)), y)

    def with_penalty(params: Params, x: Tensor, y: Tensor) -> Tensor:
        # Kernels decay and the bias of the last layer does, norms do not.
        decaying = [each for name, each in params.items() if each.ndim > 1 or name == "out.bias"]
        squares = torch.stack([each.square().sum() for each in decaying])
        return mean_loss(params, x, y) + problem.l2 * squares.sum()

    gradients = vmap(grad(with_penalty if problem.l2 else mean_loss))

    def spread(tree: Params) -> Params:
        return {name: each.expand(problem.cohort, *each.shape) for name, each in tree.items()}

    @torch.no_grad()
    def one_round(x: Tensor, y: Tensor) -> None:
        """Takes a round on examples [cohort, steps, batch, ...]."""
        w, m = spread(server), spread(momentum)
        P = {name: torch.zeros_like(each) for name, each in w.items()} if decoupled else {}
        for step in range(problem.steps):
            g = gradients(w, x[:, step], y[:, step])
            w = {name: each.add(g[name], alpha=-problem.rate) for name, each in w.items()}
            if decoupled:
                m = {name: each.lerp(g[name], 1 - problem.beta1) for name, each in m.items()}
                P = {name: each.add_(m[name]) for name, each in P.items()}
        for name, each in server.items():
            if decoupled:
                each.sub_(P[name].mean(0), alpha=problem.rate)
                momentum[name].copy_(m[name].mean(0))
            else:
                each.copy_(w[name].mean(0))

    def rounds(number: int) -> None:
        shape = (problem.cohort, problem.steps, problem.batch)
        for _ in range(number):
            clients = torch.randperm(len(x), device=device)[: problem.cohort, None]
            rows = torch.rand(problem.cohort, x.shape[1], device=device).argsort(1)
            one_round(
                x[clients, rows].reshape(*shape, *x.shape[2:]), y[clients, rows].reshape(shape)
            )
        if device == "cuda":
            torch.cuda.synchronize()

    def loss() -> float:
        with torch.no_grad():
            return float(mean_loss(server, check_x.flatten(0, 2), check_y.flatten()))

    def check() -> Weights:
        one_round(check_x, check_y)
        return nets.extract(model, problem)

    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    driver.serve(problem, loss, check, rounds, packages=["torch", "numpy"], device=name)


if __name__ == "__main__":
    main()
