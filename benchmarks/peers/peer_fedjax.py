"""The round in FedJAX, its federated averaging on a Haiku model: `peer_fedjax.py PROBLEM DEVICES`.

With one device its clients follow one another. With more, its `pmap` spreads them over as many
virtual CPU devices; that needs a JAX of its time.
"""

# Checked alike whether the packages are installed or not.
# mypy: disable-error-code="import-not-found, no-untyped-call"

import sys
from typing import Any

import jax

jax.tree_map = jax.tree.map  # type: ignore[attr-defined]  # FedJAX 0.0.17 knows no newer name

import fedjax  # noqa: E402
import haiku as hk  # noqa: E402
import numpy as np  # noqa: E402
import protocol  # noqa: E402
from fedjax.algorithms import fed_avg  # noqa: E402
from protocol import Problem, Weights  # noqa: E402


def forward(problem: Problem, x: Any) -> Any:
    if problem.model == "cnn":
        x = jax.nn.relu(hk.Conv2D(32, 3, padding="VALID", name="conv1")(x))
        x = jax.nn.relu(hk.Conv2D(64, 3, padding="VALID", name="conv2")(x))
        x = hk.MaxPool((1, 2, 2, 1), (1, 2, 2, 1), "VALID")(x)
        hidden, classes = 128, 62
    else:
        hidden, classes = 64, 10
    x = jax.nn.relu(hk.Linear(hidden, name="hidden")(x.reshape(x.shape[0], -1)))
    return hk.Linear(classes, name="out")(x)


def main() -> None:
    driver = protocol.Driver()
    problem = protocol.load(sys.argv[1])
    devices = int(sys.argv[2])
    assert jax.device_count() == devices
    if devices > 1:
        fedjax.set_for_each_client_backend("pmap")
    model = fedjax.create_model_from_haiku(
        hk.transform(lambda batch: forward(problem, batch["x"])),
        sample_batch={"x": problem.x[0][:1], "y": problem.y[0][:1]},
        train_loss=lambda batch, logits: fedjax.metrics.unreduced_cross_entropy_loss(
            batch["y"], logits
        ),
    )

    def algorithm(skip_shuffle: bool) -> Any:
        return fed_avg.federated_averaging(
            fedjax.model_grad(model),
            client_optimizer=fedjax.optimizers.sgd(problem.rate),
            server_optimizer=fedjax.optimizers.sgd(1.0),
            client_batch_hparams=fedjax.ShuffleRepeatBatchHParams(
                problem.batch, num_epochs=1, skip_shuffle=skip_shuffle
            ),
        )

    short = {"kernel": "w", "bias": "b"}
    params: dict[str, dict[str, Any]] = {}
    for name, array in problem.weights.items():
        layer, kind = name.split("/")
        params.setdefault(layer, {})[short[kind]] = array
    shuffled, in_order = algorithm(skip_shuffle=False), algorithm(skip_shuffle=True)
    state = {"server": shuffled.init(jax.tree.map(jax.numpy.asarray, params))}
    federation = fedjax.InMemoryFederatedData(
        {
            f"{client:04d}": {"x": x, "y": y}
            for client, (x, y) in enumerate(zip(problem.x, problem.y, strict=True))
        }
    )
    sampler = fedjax.client_samplers.UniformGetClientSampler(federation, problem.cohort, seed=0)

    def rounds(number: int) -> None:
        for _ in range(number):
            state["server"], _ = shuffled.apply(state["server"], sampler.sample())
        jax.block_until_ready(state["server"].params)

    def loss() -> float:
        x, y = np.concatenate(problem.check_x), np.concatenate(problem.check_y)
        logits = model.apply_for_eval(state["server"].params, {"x": x, "y": y})
        return float(fedjax.metrics.unreduced_cross_entropy_loss(y, logits).mean())

    def check() -> Weights:
        clients = [
            (position, fedjax.ClientDataset({"x": x, "y": y}), jax.random.PRNGKey(position))
            for position, (x, y) in enumerate(zip(problem.check_x, problem.check_y, strict=True))
        ]
        state["server"], _ = in_order.apply(state["server"], clients)
        return {
            name: np.asarray(state["server"].params[name.split("/")[0]][short[name.split("/")[1]]])
            for name in problem.weights
        }

    driver.serve(problem, loss, check, rounds, packages=["fedjax", "jax", "dm-haiku", "numpy"])


if __name__ == "__main__":
    main()
