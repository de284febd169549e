"""The optimiser against its equations in NumPy, and against a compiled one."""

import copy
import io
import shutil

import numpy as np
import pytest
import torch

from fedda.core import tree
from fedda.errors import InputError
from fedda.torch import DecoupledSGD, begin_round, end_round
from helpers.torch_problem import (
    CLIENTS,
    HYPER,
    F,
    Side,
    assert_equal_modules,
    backward,
    context,
    network,
    twin,
)

pytestmark = pytest.mark.usefixtures("x64")


def recursion(w, gradients, lr, beta1, mu, m):
    """The equations, in NumPy; None stands for no gradient."""
    W = w
    for gradient in gradients:
        g = (0 if gradient is None else gradient) + mu * (w - W)
        w = w - lr * g
        m = beta1 * m + (1 - beta1) * g
    return w, m


def follow(optimizer, gradients):
    """Takes a step for each row of gradients, of which there is one for each parameter."""
    for row in gradients:
        optimizer.zero_grad()
        for w, gradient in zip(optimizer.param_groups[0]["params"], row, strict=True):
            w.grad = None if gradient is None else torch.tensor(gradient)
        optimizer.step()


@pytest.mark.parametrize("mu", [0.0, 0.4])
@pytest.mark.parametrize("beta1", [0.0, 0.9])
def test_the_equations(beta1, mu):
    rng = np.random.default_rng(0)
    first, momenta = ([rng.normal(size=shape) for shape in ((3, 2), (4,))] for _ in range(2))
    rows = [[rng.normal(size=w.shape) for w in first] for _ in range(6)]
    rows[2][1] = rows[5][1] = None
    params = [torch.nn.Parameter(torch.tensor(w)) for w in first]
    optimizer = DecoupledSGD(params, lr=0.3, beta1=beta1, mu=mu)
    follow(optimizer, rows[:1])  # a round before, which must leave no trace
    with torch.no_grad():
        for w, start in zip(params, first, strict=True):
            w.copy_(torch.tensor(start))
    optimizer.start(dict(zip(params, map(torch.tensor, momenta), strict=True)))
    follow(optimizer, rows)
    for place, w in enumerate(params):
        gradients = [row[place] for row in rows]
        expected = recursion(first[place], gradients, 0.3, beta1, mu, momenta[place])
        found = w.detach().numpy(), optimizer.state[w]["momentum"].numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)
        assert optimizer.state[w]["step"] == len(rows)


def test_a_momentum_without_gradients_decays():
    w = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = DecoupledSGD([w], beta1=0.5)
    optimizer.start({w: torch.full((2,), 8.0)})
    follow(optimizer, [[None]] * 3)
    assert optimizer.state[w]["momentum"].tolist() == [1, 1]
    assert w.tolist() == [1, 1]


def test_groups_have_numbers_of_their_own():
    one, other = (torch.nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2))
    optimizer = DecoupledSGD([{"params": [one]}, {"params": [other], "lr": 2.0, "beta1": 0.5}])
    for w in (one, other):
        w.grad = torch.ones_like(w)
    optimizer.step()
    assert (one.item(), other.item()) == (-0.1, -2.0)
    assert optimizer.state[other]["momentum"].item() == 0.5


def test_sparse_gradients():
    table = torch.nn.Embedding(5, 2, sparse=True, dtype=torch.float64)
    dense = copy.deepcopy(table)
    dense.sparse = False
    for module in (table, dense):
        optimizer = DecoupledSGD(module.parameters(), mu=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            module(torch.tensor([1, 3, 1])).square().sum().backward()
            optimizer.step()
    assert torch.equal(table.weight, dense.weight)


def test_a_closure_computes_the_loss():
    plain, closed = network(), network()
    x, y = (torch.tensor(column) for column in CLIENTS[0])
    one, other = DecoupledSGD(plain.parameters()), DecoupledSGD(closed.parameters())

    def closure():
        other.zero_grad()
        loss = F.mse_loss(closed(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        one.zero_grad()
        loss = F.mse_loss(plain(x), y)
        loss.backward()
        assert one.step() is None
        assert other.step(closure).item() == loss.item()
    assert_equal_modules(plain, closed)


def test_a_state_dict_in_the_middle_of_a_round():
    server = Side("fedda-adam", HYPER["fedda-adam"] | {"mu": 0.1}, twin(), bias="steps")
    server.state = server.state._replace(momentum=tree.scale(0.5, server.state.params))
    module = network()
    optimizer = DecoupledSGD(module.parameters())
    order = begin_round(server.content(), module, optimizer)

    def steps(module, optimizer, pairs):
        for pair in pairs:
            optimizer.zero_grad()
            backward(module, pair)
            optimizer.step()

    steps(module, optimizer, CLIENTS[:2])
    file = io.BytesIO()
    torch.save((module.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    weights, state = torch.load(file, weights_only=True)
    again = network()
    resumed = DecoupledSGD(again.parameters())
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    replies = []
    for each in ((module, optimizer), (again, resumed)):
        steps(*each, CLIENTS[2:4])
        replies.append(end_round(order, context(), *each, examples=3, loss=1.0, visited=5))
    assert_equal_modules(module, again)
    one, other = (reply["upload"] for reply in replies)
    assert {name: one[name].data for name in one} == {name: other[name].data for name in other}
    assert one["sum/steps/value"].numpy() == 3 * 4


def compiled_rounds(backend):
    """Two rounds with a compiled step and a compiled network, and without."""
    plain, compiled = network(), network()
    called = torch.compile(compiled, backend=backend)
    one, other = (DecoupledSGD(net.parameters(), mu=0.1) for net in (plain, compiled))
    step = torch.compile(other.step, backend=backend, fullgraph=True)
    for number in range(2):
        for optimizer in (one, other):
            optimizer.start(
                {w: torch.full_like(w, number) for w in optimizer.param_groups[0]["params"]}
            )
        for _ in range(2):
            for module, optimizer, move in ((plain, one, one.step), (called, other, step)):
                optimizer.zero_grad()
                backward(module, CLIENTS[0])
                move()
    for w, v in zip(plain.parameters(), compiled.parameters(), strict=True):
        for found, expected in ((v, w), (other.state[v], one.state[w])):
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    "backend",
    [
        "eager",
        "aot_eager",
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(not shutil.which("g++"), reason="needs a compiler"),
            ],
        ),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of PyTorch, about itself
def test_compiled_once_for_all_rounds(backend):
    torch.compiler.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled_rounds(backend)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu():
    here, there = network(), network().cuda()
    one, other = (DecoupledSGD(net.parameters(), mu=0.1) for net in (here, there))
    for _ in range(3):
        for module, optimizer in ((here, one), (there, other)):
            optimizer.zero_grad()
            device = next(module.parameters()).device
            x, y = (torch.tensor(column, device=device) for column in CLIENTS[0])
            F.mse_loss(module(x), y).backward()
            optimizer.step()
    for w, v in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(v.cpu(), w, rtol=0, atol=1e-13)
        m = other.state[v]["momentum"]
        assert m.is_cuda
        torch.testing.assert_close(m.cpu(), one.state[w]["momentum"], rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ({"lr": 0.0}, "lr of DecoupledSGD must be a positive number, got 0.0"),
        ({"lr": float("nan")}, "lr of DecoupledSGD must be a positive number, got nan"),
        ({"lr": torch.tensor(0.1)}, "lr of DecoupledSGD must be a positive number, got tensor"),
        ({"beta1": 1.0}, r"beta1 of DecoupledSGD must be a number in \[0, 1\), got 1.0"),
        ({"mu": -1.0}, "mu of DecoupledSGD must be zero or a positive number, got -1.0"),
        ({"mu": True}, "mu of DecoupledSGD must be zero or a positive number, got True"),
    ],
    ids=str,
)
def test_numbers_that_are_refused(number, words):
    with pytest.raises(InputError, match=words):
        DecoupledSGD(network().parameters(), **number)
    with pytest.raises(InputError, match=words):
        DecoupledSGD([{"params": network().parameters(), **number}])


def test_steps_that_are_lost_beside_the_weights_are_in_the_sum():
    """In float32 a step of 2e-8 leaves a w of 1 where it is."""
    w = torch.nn.Parameter(torch.ones(1))
    optimizer = DecoupledSGD([w], lr=1e-3)
    for _ in range(5):
        w.grad = torch.full((1,), 2e-5)
        optimizer.step()
    assert w.item() == 1
    assert optimizer.state[w]["sum"].item() == pytest.approx(1e-4, rel=1e-6)
