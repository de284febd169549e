"""The optimiser of a FedDA client, for a PyTorch training loop.

The client runs plain SGD. It also accumulates a momentum, which its steps do not use.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from fedda.errors import InputError

_DOMAINS: dict[str, tuple[str, Callable[[float], bool]]] = {
    "lr": ("a positive number", lambda value: value > 0),
    "beta1": ("a number in [0, 1)", lambda value: 0 <= value < 1),
    "mu": ("zero or a positive number", lambda value: value >= 0),
}


class DecoupledSGD(torch.optim.Optimizer):
    """SGD that also accumulates the decoupled momentum of FedDA.

        g = gradient + mu (w - W)
        w <- w - lr g                        the momentum is not used here
        m <- beta1 m + (1 - beta1) g
        S <- S + g

    W are the parameters at the start of a round. A round starts when the optimiser is created and
    when `start` is called. At the start, m is the server's momentum, or 0, and S is 0. A parameter
    without a gradient counts as one with gradient 0. In a federation, the server chooses lr, beta1
    and mu: the strategy `fedda.flower.FedDA` sends them in its configuration, and `begin_round`
    sets them.

    Args:
        params: Parameters, or groups of parameters, as for any PyTorch optimiser.
        lr: The learning rate.
        beta1: The decay of the momentum.
        mu: The weight of the proximal term.

    Example:
        >>> import torch
        >>> w = torch.nn.Parameter(torch.tensor(1.0))
        >>> optimizer = DecoupledSGD([w], lr=0.1, beta1=0.9)
        >>> (w**2).backward()
        >>> optimizer.step()
        >>> print(f"w = {w.item():.2f}, m = {optimizer.state[w]['momentum'].item():.2f}")
        w = 0.80, m = 0.20
    """

    def __init__(
        self, params: Iterable[Any], lr: float = 0.1, beta1: float = 0.9, mu: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "beta1": beta1, "mu": mu})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters. Their round starts at their current values."""
        for name, (expected, allows) in _DOMAINS.items():
            value = param_group.get(name, self.defaults[name])
            number = isinstance(value, Real) and not isinstance(value, bool)
            if not number or not math.isfinite(value) or not allows(value):
                raise InputError(f"{name} of DecoupledSGD must be {expected}, got {value!r}.")
        super().add_param_group(param_group)
        self._start(self.param_groups[-1]["params"], {})

    def start(self, momentum: Mapping[Tensor, Tensor] | None = None) -> None:
        """Start a round at the current parameters.

        Args:
            momentum: The server's momentum by parameter. It is 0 for missing parameters.
        """
        for group in self.param_groups:
            self._start(group["params"], momentum or {})

    @torch.no_grad()
    def _start(self, params: Iterable[Tensor], momentum: Mapping[Tensor, Tensor]) -> None:
        for w in params:
            m = torch.zeros_like(w)
            if w in momentum:
                m.copy_(momentum[w])
            # The step is a tensor, as in the optimisers of PyTorch: with a Python number, a
            # compiled step would be compiled again for every value.
            self.state[w] = {
                "start": w.detach().clone(),
                "momentum": m,
                "sum": torch.zeros_like(w),
                "step": torch.zeros(()),
            }

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Take one step.

        Args:
            closure: Computes the loss and the gradients, as for any PyTorch optimiser.

        Returns:
            The loss of the closure, or None without a closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step(group)
        return loss

    def _step(self, group: dict[str, Any]) -> None:
        params, beta1, mu = group["params"], group["beta1"], group["mu"]
        states = [self.state[w] for w in params]
        starts, momenta, sums, counts = (
            [state[name] for state in states] for name in ("start", "momentum", "sum", "step")
        )
        gradients: list[Tensor] | tuple[Tensor, ...] = [
            torch.zeros_like(w) if w.grad is None else w.grad.to_dense() for w in params
        ]
        if mu:
            pulls = torch._foreach_sub(params, starts)
            gradients = torch._foreach_add(gradients, pulls, alpha=mu)
        torch._foreach_add_(params, gradients, alpha=-group["lr"])
        torch._foreach_mul_(momenta, beta1)
        torch._foreach_add_(momenta, gradients, alpha=1 - beta1)
        torch._foreach_add_(sums, gradients)
        torch._foreach_add_(counts, 1)
