"""The reply of a PyTorch client to the strategy `fedda.flower.FedDA`. It needs no JAX."""

import torch
from flwr.app import ArrayRecord
from torch import Tensor
from torch.nn import Module

from fedda.errors import InputError
from fedda.torch.decoupled_sgd import DecoupledSGD


def reply_arrays(model: Module, optimizer: DecoupledSGD) -> ArrayRecord:
    """Return the arrays of a client's reply to the strategy `fedda.flower.FedDA`.

    They replace `ArrayRecord(model.state_dict())`. `fedda.flower.strategy` describes them.

    Args:
        model: The trained module.
        optimizer: The optimiser of this round. It must have been created after the server's weights
            were loaded into the module.

    Raises:
        InputError: The optimiser is not a `DecoupledSGD`, trains parameters of another module, or
            its steps do not lead from its start to the weights of the module.

    Example:
        >>> import torch
        >>> from fedda.torch import DecoupledSGD, reply_arrays
        >>> model = torch.nn.Linear(2, 1)
        >>> optimizer = DecoupledSGD(model.parameters(), lr=0.1)
        >>> model(torch.ones(3, 2)).mean().backward()
        >>> optimizer.step()
        >>> reply_arrays(model, optimizer)["fedda/momentum/bias"].numpy()
        array([0.1], dtype=float32)
    """
    if not isinstance(optimizer, DecoupledSGD):
        raise InputError(
            f"optimizer must be a fedda.torch.DecoupledSGD, got {type(optimizer).__name__}. "
            "FedDA needs its momentum: create it with DecoupledSGD(model.parameters(), lr=lr)."
        )
    model = getattr(model, "_orig_mod", model)  # torch.compile wraps the module
    arrays = model.state_dict(keep_vars=True)
    trained = {name: w for name, w in arrays.items() if w in optimizer.state}
    params = [w for group in optimizer.param_groups for w in group["params"]]
    if not params or {*map(id, params)} != {*map(id, trained.values())}:
        raise InputError(
            "optimizer must train parameters of this model, but it has parameters of another one. "
            "Create it with DecoupledSGD(model.parameters(), lr=lr) in every round."
        )
    rates = {
        tuple(float(group[name]) for name in ("lr", "beta1", "mu"))
        for group in optimizer.param_groups
    }
    if len(rates) > 1:
        raise InputError(
            f"all groups of DecoupledSGD must have the same lr, beta1 and mu, got {sorted(rates)}."
        )
    (lr, beta1, mu), steps = rates.pop(), float(optimizer.state[params[0]]["step"])
    for name, w in trained.items():
        _check_displacement(name, w.detach(), lr, optimizer.state[w])
        arrays[f"fedda/gradients/{name}"] = optimizer.state[w]["sum"]
        arrays[f"fedda/momentum/{name}"] = optimizer.state[w]["momentum"]
        del arrays[name]
    for name, number in {"steps": steps, "lr": lr, "beta1": beta1, "mu": mu}.items():
        arrays[f"fedda/{name}"] = torch.tensor(number, dtype=torch.float64)
    return ArrayRecord(dict(arrays))


def _check_displacement(name: str, w: Tensor, lr: float, state: dict[str, Tensor]) -> None:
    """Raise an `InputError` unless the steps of this round lead from the start to the weights.

    Each step rounds the weight and the sum by at most `eps / 2` of their sizes. The factor 10 is
    for weights that were larger in between.
    """
    if not w.numel():
        return
    start, moved = state["start"], lr * state["sum"]
    size = start.abs().max() + w.abs().max() + moved.abs().max()
    rounding = 10 * state["step"].to(w.device) * torch.finfo(w.dtype).eps * size
    if (w - (start - moved)).abs().max() > rounding:
        raise InputError(
            f"the steps of DecoupledSGD do not lead to the weights of the model, for example to "
            f"{name}. Create DecoupledSGD in every round after model.load_state_dict, keep its lr, "
            "and do not change the weights outside of its steps."
        )
