"""Models are pure functions; convolutions and adapters compute what the originals compute."""

import importlib
import importlib.util
import re
from itertools import pairwise

import equinox as eqx
import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax, random

import fedda
from fedda.core import losses, tree
from fedda.errors import InputError
from fedda.models import (
    Model,
    as_model,
    autoencoder,
    cnn,
    from_equinox,
    from_nnx,
    linear,
    mlp,
    with_input,
    with_precision,
)
from fedda.models.conv import max_pool, max_pool_same, patches_conv
from fedda.models.convolutional import CNN

# ------------------------------------------------------------------------------ convolutions

KERNELS = [(1, 1), (3, 3), (5, 5), (7, 7), (2, 5)]
PADDINGS = ["SAME", "VALID", ((2, 1), (0, 3))]
STRIDES = [(1, 1), (2, 2), (3, 3), (2, 3)]
# Every kernel with every padding, and every stride with every padding.
CONVOLUTIONS = [
    (kernel, padding, STRIDES[(i + j) % 4])
    for i, kernel in enumerate(KERNELS)
    for j, padding in enumerate(PADDINGS)
]


def normal(number, shape):
    return random.normal(random.key(number), shape)


def plain_conv(inputs, kernel, strides, padding):
    return lax.conv_general_dilated(
        inputs, kernel, strides, padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("backend", ["cpu", "gpu"])  # which take the patches in different ways
@pytest.mark.parametrize(("size", "padding", "strides"), CONVOLUTIONS, ids=str)
def test_patches_conv_is_a_convolution(monkeypatch, backend, size, padding, strides):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    inputs, kernel = normal(0, (2, 9, 10, 2)), normal(1, (*size, 2, 3))

    @jax.jit
    def values_and_gradients(inputs, kernel):
        found = []
        for conv in (patches_conv, plain_conv):
            outputs, pull = jax.vjp(lambda *w, f=conv: f(*w, strides, padding), inputs, kernel)
            weights = jnp.sin(jnp.arange(outputs.size, dtype=float)).reshape(outputs.shape)
            found.append((outputs, *pull(weights)))
        return found

    # Sums of up to a few hundred products of numbers near 1.
    for ours, plain in zip(*values_and_gradients(inputs, kernel), strict=True):
        assert ours.shape == plain.shape
        np.testing.assert_allclose(ours, plain, rtol=0, atol=1e-12)


@pytest.mark.usefixtures("x64")
def test_patches_conv_with_a_kernel_for_each_client():
    inputs, kernels = normal(0, (4, 2, 7, 7, 3)), normal(1, (4, 3, 3, 3, 5))

    def conv(inputs, kernel):
        return patches_conv(inputs, kernel, (2, 2), "SAME")

    together = jax.jit(jax.vmap(conv))(inputs, kernels)
    for x, kernel, ours in zip(inputs, kernels, together, strict=True):
        np.testing.assert_allclose(ours, plain_conv(x, kernel, (2, 2), "SAME"), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "unsupported",
    [{"lhs_dilation": (2, 2)}, {"rhs_dilation": (1, 2)}, {"feature_group_count": 3}],
    ids=str,
)
def test_patches_conv_refuses_what_it_does_not_do(unsupported):
    with pytest.raises(ValueError, match=r"no dilation, groups or sharding; use lax\.conv"):
        patches_conv(
            normal(0, (1, 5, 5, 3)), normal(1, (3, 3, 3, 3)), (1, 1), "SAME", **unsupported
        )


@pytest.mark.parametrize(("shape", "size"), [((6, 8), 2), ((7, 9), 2), ((8, 7), 3)])
def test_max_pool_is_a_window_maximum(shape, size):
    def plain_pool(inputs):
        return flax.linen.max_pool(inputs, (size, size), (size, size), "VALID")

    @jax.jit
    def values_and_gradients(inputs):
        found = []
        for pool in (lambda x: max_pool(x, size), plain_pool):
            outputs, pull = jax.vjp(pool, inputs)
            found.append((outputs, *pull(outputs**3)))
        return found

    # Without ties a maximum's gradient is a selection, so it is exact too.
    ours, plain = values_and_gradients(normal(0, (2, *shape, 3)))
    jax.tree.map(np.testing.assert_array_equal, ours, plain)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("shape", "size", "stride"),
    [((12, 12), 3, 2), ((16, 16), 3, 2), ((7, 10), 3, 2), ((6, 7), 4, 1), ((8, 7), 2, 3)],
    ids=str,
)
def test_max_pool_same_is_a_window_maximum(shape, size, stride):
    def plain_pool(inputs):
        window, strides = (1, size, size, 1), (1, stride, stride, 1)
        return lax.reduce_window(inputs, -jnp.inf, lax.max, window, strides, "SAME")

    @jax.jit
    def values_and_gradients(inputs):
        found = []
        for pool in (lambda x: max_pool_same(x, size, stride), plain_pool):
            outputs, pull = jax.vjp(pool, inputs)
            weights = jnp.sin(jnp.arange(outputs.size, dtype=float)).reshape(outputs.shape)
            found.append((outputs, *pull(weights)))
        return found

    # With negative numbers, which zeros around an image would hide, and with equal numbers.
    inputs = jnp.round(2 * normal(0, (2, *shape, 3))) - 3
    ours, plain = values_and_gradients(inputs)
    np.testing.assert_array_equal(ours[0], plain[0])
    assert ours[0].shape == (2, -(-shape[0] // stride), -(-shape[1] // stride), 3)
    # A pixel's gradient is a sum over the windows that it leads.
    np.testing.assert_allclose(ours[1], plain[1], rtol=0, atol=1e-14)


def test_max_pool_same_keeps_what_is_not_a_number():
    for place in range(3):
        inputs = jnp.zeros((1, 3, 3, 1)).at[0, 1, place].set(jnp.nan)
        assert np.isnan(max_pool_same(inputs, 3, 3)).all()


# ---------------------------------------------------------------------------- models of Flax


def test_parameters_of_the_cnn():
    params = jax.eval_shape(cnn(28, 1, 62).init, random.key(0))
    convolutions = (3 * 3 * 1 + 1) * 32 + (3 * 3 * 32 + 1) * 64
    pooled = (28 - 2 - 2) // 2
    dense = (pooled * pooled * 64 + 1) * 128 + (128 + 1) * 62
    assert tree.size(params) == convolutions + dense == 1_206_590


def test_parameters_of_the_linear_model_for_stack_overflow():
    params = jax.eval_shape(linear(10_000, 500).init, random.key(0))
    assert tree.size(params) == (10_000 + 1) * 500 == 5_000_500


def test_parameters_of_the_autoencoder():
    params = jax.eval_shape(autoencoder().init, random.key(0))
    sizes = (784, 1000, 500, 250, 30, 250, 500, 1000, 784)
    assert tree.size(params) == sum((a + 1) * b for a, b in pairwise(sizes)) == 2_837_314


def test_autoencoder_starts_from_glorot_uniform():
    params = jax.jit(autoencoder().init)(random.key(0))
    for layer in params["layers"].values():
        kernel = np.asarray(layer["kernel"], np.float64)
        bound = np.sqrt(6 / sum(kernel.shape))
        # The largest of n uniform numbers misses the bound by more than 1 / 100 of it with a
        # probability of 0.99^n. The variance is bound² / 3, and that of a square 4 bound⁴ / 45.
        assert 0.99 * bound < np.abs(kernel).max() <= bound * (1 + 1e-6)
        spread = 5 * np.sqrt(4 / 45 / kernel.size) * bound**2
        np.testing.assert_allclose(np.mean(kernel**2), bound**2 / 3, rtol=0, atol=spread)
        np.testing.assert_array_equal(layer["bias"], 0)


@pytest.mark.usefixtures("x64")
def test_autoencoder_against_numpy():
    model, x = autoencoder(12), np.asarray(normal(1, (5, 3, 4)))  # flattened by the model
    params = jax.jit(model.init)(random.key(0))
    params = jax.tree.map(lambda leaf: leaf.astype(float) + 0.01, params)
    expected = x.reshape(5, 12)
    for number in range(8):
        layer = params["layers"][number]
        expected = expected @ np.asarray(layer["kernel"]) + np.asarray(layer["bias"])
        if number != 3:
            expected = 1 / (1 + np.exp(-expected))
    np.testing.assert_allclose(model.apply(params, jnp.asarray(x)), expected, rtol=1e-12)
    assert model.train is None


def test_cnn_drops_a_quarter_of_the_maxima_and_half_of_the_hidden_layer():
    module = nnx.eval_shape(lambda: CNN(28, 1, 62, patches_conv, nnx.Rngs(0)))
    assert (module.dropout1.rate, module.dropout2.rate) == (0.25, 0.5)


@pytest.mark.usefixtures("x64")
def test_cnn_against_its_description():
    model, x = cnn(9, 2, 5), normal(1, (4, 9, 9, 2))
    params = jax.tree.map(lambda leaf: leaf.astype(float) + 0.1, model.init(random.key(0)))

    def described(params, x):
        for name in ("conv1", "conv2"):
            x = plain_conv(x, params[name]["kernel"], (1, 1), "VALID")
            x = jax.nn.relu(x + params[name]["bias"][None, None, None])
        x = flax.linen.max_pool(x, (2, 2), (2, 2)).reshape(4, -1)
        x = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"][None])
        return x @ params["out"]["kernel"] + params["out"]["bias"][None]

    outputs, expected = (jax.jit(f)(params, x) for f in (model.apply, described))
    np.testing.assert_allclose(outputs, expected, rtol=1e-12)


def forward(layers, x):
    """What a perceptron computes, in NumPy."""
    x = np.asarray(x, np.float64).reshape(len(x), -1)
    for number, layer in enumerate(layers):
        x = x @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"], np.float64)
        x = np.maximum(x, 0) if number + 1 < len(layers) else x
    return x


@pytest.mark.parametrize(
    ("model", "layers"), [(linear(12, 3), ["out"]), (mlp(12, 7, 3), ["hidden", "out"])]
)
def test_linear_and_mlp_against_numpy(model, layers):
    params = model.init(random.key(3))
    params = jax.tree.map(lambda leaf: leaf + 0.1, params)  # biases start at 0
    x = normal(1, (5, 3, 4))  # flattened by the model
    outputs = model.apply(params, x)
    assert outputs.shape == (5, 3)
    np.testing.assert_allclose(outputs, forward([params[n] for n in layers], x), rtol=2e-5)
    assert model.train is None


class Noisy(nnx.Module):
    def __init__(self, rngs):
        self.first, self.dropout = nnx.Linear(6, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.norm, self.last = nnx.LayerNorm(8, rngs=rngs), nnx.Linear(8, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.dropout(nnx.relu(self.first(x)))))


def is_nested_dict_of_arrays(value):
    if isinstance(value, dict):
        return all(is_nested_dict_of_arrays(each) for each in value.values())
    return isinstance(value, jax.Array)


def test_from_nnx_is_the_module_itself():
    model, x = from_nnx(Noisy), normal(1, (5, 6))
    params = model.init(random.key(0))
    assert is_nested_dict_of_arrays(params)
    assert set(params) == {"first", "last", "norm"}
    module = Noisy(nnx.Rngs(random.key(0)))
    module.eval()
    np.testing.assert_array_equal(params["first"]["kernel"], module.first.kernel[...])
    np.testing.assert_array_equal(model.apply(params, x), module(x))
    np.testing.assert_array_equal(model.apply(params, x), model.apply(params, x))


def test_from_nnx_applies_the_parameters_it_is_given():
    # ... not those of another call, nor those of the module it was made from.
    model, x = from_nnx(Noisy), normal(1, (5, 6))
    first, second = model.init(random.key(0)), model.init(random.key(1))
    before = model.apply(first, x)
    assert not np.array_equal(before, model.apply(second, x))
    np.testing.assert_array_equal(before, model.apply(first, x))


def test_from_nnx_noise_follows_the_key():
    model, x = from_nnx(Noisy), jnp.ones((400, 6))
    params = model.init(random.key(0))
    first, again, other = (model.train(params, x, random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, model.apply(params, x))
    assert len(np.unique(np.asarray(first), axis=0)) > 4  # every example has its own mask


def test_a_module_of_flax_is_where_every_seed_starts():
    module, x = Noisy(nnx.Rngs(3)), jnp.ones((400, 6))
    model = as_model(module)
    first, second = (model.init(random.key(seed)) for seed in (0, 1))
    jax.tree.map(np.testing.assert_array_equal, first, second)
    jax.tree.map(
        np.testing.assert_array_equal, first, nnx.to_pure_dict(nnx.state(module, nnx.Param))
    )
    one, again, other = (model.train(first, x, random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(one, again)
    assert not np.array_equal(one, other)
    module.eval()
    np.testing.assert_allclose(model.apply(first, x), module(x), atol=1e-6)


def test_a_module_of_equinox_is_where_every_seed_starts():
    module, x = perceptron(random.key(3)), jnp.ones((4, 3))
    model = as_model(module)
    for seed in (0, 1):
        params = model.init(random.key(seed))
        np.testing.assert_array_equal(model.apply(params, x), jax.vmap(module)(x))


def test_from_nnx_refuses_batch_norm():
    message = (
        "from_nnx got a module that keeps BatchStat besides its parameters, but a federated model "
        "is its parameters alone. Use GroupNorm or LayerNorm, not BatchNorm."
    )
    with pytest.raises(InputError, match=re.escape(message)):
        from_nnx(
            lambda rngs: nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs))
        )


# -------------------------------------------------------------------------- models of Equinox


def perceptron(key):
    return eqx.nn.MLP(3, 2, 4, 1, key=key)


class Dropping(eqx.Module):
    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    last: eqx.nn.Linear

    def __init__(self, key):
        one, two = random.split(key)
        self.first, self.last = eqx.nn.Linear(3, 8, key=one), eqx.nn.Linear(8, 2, key=two)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, key=None):
        return self.last(self.dropout(jax.nn.relu(self.first(x)), key=key))


@pytest.mark.parametrize("make", [perceptron, Dropping])
def test_from_equinox_is_the_module_itself(make):
    model, x = from_equinox(make), normal(1, (5, 3))
    params = model.init(random.key(0))
    module = eqx.nn.inference_mode(make(random.key(0)))
    np.testing.assert_array_equal(model.apply(params, x), jax.vmap(module)(x))
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(params))
    assert tree.size(params) == sum(
        map(jnp.size, jax.tree.leaves(eqx.filter(module, eqx.is_array)))
    )


def test_from_equinox_gives_each_example_its_own_noise():
    model, x = from_equinox(Dropping), jnp.ones((400, 3))
    params = model.init(random.key(0))
    first, again, other = (model.train(params, x, random.key(k)) for k in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    assert not np.array_equal(first, model.apply(params, x))
    assert len(np.unique(np.asarray(first), axis=0)) > 4


def test_from_equinox_trains():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 20, 3)).astype(np.float32)
    y = (x @ rng.normal(size=(3, 2))).astype(np.float32)
    result = fedda.run(
        "fedavg", from_equinox(perceptron), list(zip(x, y, strict=True)), losses.squared_error,
        test=(x[0], y[0]), rounds=30, cohort=3, eval_every=30, batch=5, client_lr=0.1,
    )  # fmt: skip
    before, after = (row["loss"] for row in result.history)
    assert after < before / 2


# ------------------------------------------------------------------------------------- inputs


def test_with_input_prepares_before_the_model():
    def unpack(x):
        return x.astype(jnp.float32) / 255

    plain, noisy = linear(6, 3), from_nnx(Noisy)
    x = jnp.asarray(np.random.default_rng(0).integers(0, 256, (5, 6)), jnp.uint8)
    for model in (plain, noisy):
        packed, params = with_input(model, unpack), model.init(random.key(0))
        jax.tree.map(np.testing.assert_array_equal, packed.init(random.key(0)), params)
        np.testing.assert_array_equal(packed.apply(params, x), model.apply(params, unpack(x)))
    assert with_input(plain, unpack).train is None
    params, key = noisy.init(random.key(0)), random.key(7)
    np.testing.assert_array_equal(
        with_input(noisy, unpack).train(params, x, key), noisy.train(params, unpack(x), key)
    )


@pytest.mark.parametrize(("precision", "expected"), [("fp32", "HIGHEST"), ("tf32", "HIGH")])
def test_products_have_the_precision_that_is_asked_for(precision, expected):
    model = with_precision(cnn(9, 2, 5), precision)

    def loss(params):
        return model.train(params, normal(1, (4, 9, 9, 2)), random.key(2)).sum()

    params = model.init(random.key(0))
    found = re.findall(
        r"precision=\(?(?:Precision\.)?(\w+)", str(jax.make_jaxpr(jax.grad(loss))(params))
    )
    assert set(found) == {expected}
    assert len(found) >= 10  # four layers forward; backward, all but the first have two


def test_bf16_rounds_weights_and_inputs_and_learns_in_float32():
    model = linear(3, 2)
    low = with_precision(model, "bf16")
    params, x = model.init(random.key(0)), normal(1, (5, 3))
    kernel, inputs = (
        np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (params["out"]["kernel"], x)
    )
    outputs = low.apply(params, x)
    assert outputs.dtype == jnp.float32
    # A sum of three exact products is rounded once, to 8 bits.
    np.testing.assert_allclose(outputs, inputs @ kernel, rtol=2**-8)
    gradient = jax.grad(lambda p: low.apply(p, x)[:, 0].sum())(params)
    assert {leaf.dtype for leaf in jax.tree.leaves(gradient)} == {jnp.dtype("float32")}
    np.testing.assert_allclose(
        gradient["out"]["kernel"][:, 0], inputs.sum(0), rtol=2**-7, atol=2**-7
    )


def test_bf16_leaves_whole_numbers_alone():
    model = Model(init=lambda key: {"w": jnp.ones(3)}, apply=lambda params, x: params["w"][x])
    x = jnp.array([0, 2], jnp.uint8)
    np.testing.assert_array_equal(with_precision(model, "bf16").apply({"w": jnp.arange(3.0)}, x), x)


def test_an_unknown_precision_is_refused():
    with pytest.raises(InputError, match=r"unknown precision .fp16.\. .*bf16, fp32, tf32"):
        with_precision(linear(3, 2), "fp16")


def test_with_input_composes():
    model = Model(lambda key: jnp.ones(()), lambda params, x: params * x)
    twice = with_input(with_input(model, lambda x: x + 1), lambda x: 10 * x)  # the last one first
    assert twice.apply(jnp.asarray(2.0), jnp.asarray([3.0])) == 2 * (10 * 3 + 1)


def test_the_models_of_the_tasks_are_functions_of_one_module():
    """A file of the same name would hide the function once it is imported."""
    importlib.import_module("fedda.models.dense")
    sizes = {"linear": (4, 3), "mlp": (4, 5, 3), "cnn": (8, 1, 3), "autoencoder": (4,)}
    for name, arguments in (sizes | {"resnet18": (3,)}).items():
        model = getattr(fedda.models, name)(*arguments)
        assert isinstance(model, Model)
        assert name in fedda.models.__all__
    names = {*fedda.models.__all__}
    if importlib.util.find_spec("torch") is None:
        names.remove("from_torch")  # says which extra to install
    assert {name for name in names if not hasattr(fedda.models, name)} == set()
    with pytest.raises(AttributeError, match="has no attribute 'mpl'"):
        _ = fedda.models.mpl
