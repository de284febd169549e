"""PyTorch clients of the strategy `FedDA`: the simulation's numbers, and wrong optimisers."""

import subprocess
import sys

import jax
import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

import fedda
from fedda.core.losses import squared_error
from fedda.errors import InputError
from fedda.flower import FedDA
from fedda.torch import DecoupledSGD, reply_arrays
from helpers.flower_grid import LocalGrid
from helpers.torch_problem import HYPER, F, apart, network, twin

SIZE, ROUNDS = 8, 10
_rng = np.random.default_rng(4)
_features = [_rng.normal(0.4 * client, 1, (SIZE, 3)) for client in range(4)]
PAIRS = [(x, np.stack([np.sin(x.sum(1)), x[:, 0]], 1)) for x in _features]


def app(make, pair, steps, optimizer=DecoupledSGD):
    """A Flower client with a training loop of its own. Its batches are all of its examples."""
    made = ClientApp()

    @made.train()
    def train(message, context):
        model = make()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        config = message.content["config"]
        sgd = optimizer(model.parameters(), lr=config["lr"])
        dtype = next(model.parameters()).dtype
        x, y = (torch.tensor(column).to(dtype) for column in pair)
        for _ in range(steps):
            sgd.zero_grad()
            F.mse_loss(model(x), y).backward()
            sgd.step()
        content = {
            "arrays": reply_arrays(model, sgd),
            "metrics": MetricRecord({"num-examples": len(x)}),
        }
        return Message(RecordDict(content), reply_to=message)

    return made


def federated(name, make, pairs, steps, **settings):
    chosen = HYPER[name] | {"fraction_evaluate": 0.0} | settings
    strategy = FedDA(name.removeprefix("fedda-"), **chosen)
    grid = LocalGrid([app(make, pair, steps) for pair in pairs])
    result = strategy.start(grid, ArrayRecord(make().state_dict()), num_rounds=ROUNDS)
    return {key: array.numpy() for key, array in result.arrays.items()}


def simulated(name, dtype, pairs, **local):
    columns = [tuple(np.asarray(column, dtype) for column in pair) for pair in pairs]
    model = twin(torch.float64 if dtype is float else torch.float32)
    result = fedda.run(
        name,
        model,
        columns,
        squared_error,
        rounds=ROUNDS,
        cohort=len(pairs),
        **local,
        **HYPER[name],
    )
    return {key: np.asarray(value) for key, value in result.params.items()}


NAMES = ("fedda-sgdm", "fedda-adam", "fedda-adagrad")


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_the_strategy_trains_the_model_of_the_simulation(name, steps):
    with jax.enable_x64(True):
        expected = simulated(name, float, PAIRS, batch=SIZE, local_work=steps)
    found = federated(name, network, PAIRS, steps)
    assert apart(found, expected) <= 1e-12
    start = {key: value.numpy() for key, value in network().state_dict().items()}
    assert apart(start, expected) > 0.1, "... and it does train"


@pytest.mark.parametrize("name", NAMES)
def test_clients_weigh_as_many_examples_as_they_have(name):
    """A client's epoch is one batch here, of as many examples as it has."""
    pairs = [(x[:size], y[:size]) for (x, y), size in zip(PAIRS, (1, 8, 3, 5), strict=True)]
    with jax.enable_x64(True):
        expected = simulated(name, float, pairs, batch=SIZE, local_work=1, local_unit="epochs")
    assert apart(federated(name, network, pairs, 1), expected) <= 1e-12


@pytest.mark.parametrize("name", NAMES)
def test_single_precision(name):
    """Both differ from the computation in double precision by rounding only.

    A round rounds weights and momenta of size about 1 some 10 times, and G = (P - beta1 M) /
    (1 - beta1) amplifies a rounding of P by 10.
    """
    tolerance = ROUNDS * 10 * 10 * np.finfo(np.float32).eps
    double = federated(name, network, PAIRS, 3)
    single = federated(name, lambda: network(torch.float32), PAIRS, 3)
    expected = simulated(name, np.float32, PAIRS, batch=SIZE, local_work=3)
    assert {value.dtype for value in single.values()} == {np.dtype(np.float32)}
    assert apart(single, double) <= tolerance
    assert apart(single, expected) <= tolerance


def test_a_client_needs_no_jax():
    code = (
        "import sys, flwr.clientapp\n"
        "from fedda.torch import DecoupledSGD, reply_arrays\n"
        "assert 'jax' not in sys.modules\n"
        "import fedda.torch\n"
        "assert fedda.torch.client_app and 'jax' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Mixed(torch.nn.Module):
    """BatchNorm, a frozen layer, and a weight that two layers share."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.frozen, self.norm = torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)
        self.one, self.other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.other.weight = self.one.weight
        self.frozen.requires_grad_(False)

    def forward(self, x):
        return self.other(self.one(self.norm(self.frozen(x))))


def learning(parameters, lr):
    return DecoupledSGD([w for w in parameters if w.requires_grad], lr=lr)


def test_buffers_frozen_and_shared_parameters():
    before = {key: value.numpy() for key, value in Mixed().state_dict().items()}
    grid = LocalGrid([app(Mixed, pair, 2, learning) for pair in PAIRS])
    strategy = FedDA("sgdm", client_lr=0.1, fraction_evaluate=0.0)
    result = strategy.start(grid, ArrayRecord(Mixed().state_dict()), num_rounds=2)
    after = {key: array.numpy() for key, array in result.arrays.items()}
    Mixed().load_state_dict(result.arrays.to_torch_state_dict())
    assert after.keys() == before.keys()
    assert after["norm.num_batches_tracked"] == 4
    means = [x @ before["frozen.weight"].T + before["frozen.bias"] for x, _ in PAIRS]
    moving = (1 - 0.9**4) * np.mean([x.mean(0) for x in means], 0)  # as every batch is the same
    np.testing.assert_allclose(after["norm.running_mean"], moving, rtol=1e-5)
    np.testing.assert_array_equal(after["frozen.weight"], before["frozen.weight"])
    np.testing.assert_array_equal(after["one.weight"], after["other.weight"])
    assert np.abs(after["one.weight"] - before["one.weight"]).max() > 0.01


def test_a_compiled_module_replies_with_the_names_of_the_module():
    model = network()
    compiled = torch.compile(model, backend="eager")
    names = reply_arrays(compiled, DecoupledSGD(compiled.parameters())).keys()
    assert names == reply_arrays(model, DecoupledSGD(model.parameters())).keys()
    assert "fedda/momentum/0.weight" in names


# ------------------------------------------------------------------------- wrong optimisers


def stepped(optimizer, model):
    model(torch.ones(2, 3, dtype=torch.float64)).square().mean().backward()
    optimizer.step()
    return optimizer


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def of_another_module(model):
    return DecoupledSGD(network().parameters())


def created_before_loading(model):
    optimizer = DecoupledSGD(model.parameters())
    model.load_state_dict({key: value + 0.01 for key, value in model.state_dict().items()})
    return stepped(optimizer, model)


def kept_for_two_rounds(model):
    optimizer = stepped(DecoupledSGD(model.parameters()), model)
    model.load_state_dict({key: 0.99 * value for key, value in model.state_dict().items()})
    return stepped(optimizer, model)


def with_a_scheduler(model):
    optimizer = stepped(DecoupledSGD(model.parameters()), model)
    optimizer.param_groups[0]["lr"] *= 0.9
    return optimizer


def with_two_rates(model):
    first, *others = model.parameters()
    return DecoupledSGD([{"params": [first], "lr": 0.2}, {"params": others}])


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (sgd, "must be a fedda.torch.DecoupledSGD, got SGD. FedDA needs its momentum: create it"),
        (of_another_module, r"parameters of another one. Create it with DecoupledSGD\(model"),
        (created_before_loading, "do not lead to the weights.*after model.load_state_dict"),
        (kept_for_two_rounds, "Create DecoupledSGD in every round after"),
        (with_a_scheduler, "do not lead to the weights.*keep its lr"),
        (with_two_rates, r"must have the same lr, beta1 and mu, got \[\(0.1, .*\(0.2, "),
    ],
)
def test_a_wrong_optimizer_is_a_message(make, expected):
    model = network()
    with pytest.raises(InputError, match=expected):
        reply_arrays(model, make(model))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_rounding_of_many_steps_is_no_error(dtype):
    """The weights rise and fall: what they were in between is larger than at the end."""
    w = torch.nn.Parameter(torch.full((50,), 0.3, dtype=dtype))
    model = torch.nn.ParameterDict({"w": w})
    optimizer = DecoupledSGD(model.parameters(), lr=0.07, mu=0.01)
    generator = torch.Generator().manual_seed(0)
    for step in range(300):
        w.grad = (torch.randn(50, generator=generator) + (-1) ** (step // 100)).to(dtype)
        optimizer.step()
    assert reply_arrays(model, optimizer)["fedda/steps"].numpy() == 300
