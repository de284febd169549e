"""Modules as models of the library, and back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import random

import fedda.torch
from fedda.errors import InputError
from fedda.torch import client_app, load
from helpers.torch_problem import F, assert_equal_modules, network, twin

pytestmark = pytest.mark.usefixtures("x64")


def test_a_model_starts_from_the_weights_of_its_module():
    module = network()
    model = fedda.torch.model(module)
    before = {name: w.detach().clone() for name, w in module.named_parameters()}
    with torch.no_grad():
        module[0].weight.zero_()  # of the module, later
    for made in (model.init(random.key(0)), jax.jit(model.init)(random.key(1))):
        assert made.keys() == before.keys()
        for name, w in before.items():
            np.testing.assert_array_equal(made[name], w)


def test_a_model_cannot_be_evaluated_without_pytorch():
    model = fedda.torch.model(network())
    params = model.init(random.key(0))
    with pytest.raises(Exception, match=r"Leave out test, .* fedda\.torch\.load"):
        jax.block_until_ready(jax.jit(model.apply)(params, jnp.zeros((2, 3))))


def test_a_compiled_module_has_the_names_of_the_module():
    module = network()
    names = fedda.torch.parameters(module).keys()
    compiled = torch.compile(module, backend="eager")
    assert fedda.torch.parameters(compiled).keys() == names
    assert "0.weight" in names


def quantised():
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    return module


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (lambda: F.tanh, "must be a torch.nn.Module, got"),
        (lambda: torch.nn.Tanh(), "must have parameters, got none"),
        (quantised, r"got torch.int8 in weight. .* module.float\(\)"),
        (
            lambda: torch.nn.Sequential(network(), torch.nn.BatchNorm1d(2)),
            "BatchNorm1d '1' keeps running statistics, .* GroupNorm",
        ),
    ],
    ids=["function", "none", "integers", "BatchNorm"],
)
def test_modules_that_are_refused(module, words):
    with pytest.raises(InputError, match=words):
        fedda.torch.model(module())
    with pytest.raises(InputError, match=words):
        client_app(module(), F.mse_loss, lambda _: None)


def test_constant_buffers_are_no_matter():
    module = torch.nn.Sequential(network(), torch.nn.BatchNorm1d(2, track_running_stats=False))
    module.register_buffer("scale", torch.ones(2))
    assert len(fedda.torch.parameters(module)) == 6


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda params: params.pop("0.bias"), "4 parameters, got 3 .* 0.bias"),
        (
            lambda params: params.update({"0.bias": np.ones(2)}),
            r"0.bias has shape \(4,\) .* \(2,\)",
        ),
    ],
)
def test_other_parameters_are_not_loaded(change, words):
    module, params = network(), dict(twin().init(random.key(0)))
    change(params)
    with pytest.raises(InputError, match=words):
        load(module, params)
    assert_equal_modules(module, network())
