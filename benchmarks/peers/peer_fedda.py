"""The round in fedda: `peer_fedda.py PROBLEM SETTINGS`; SETTINGS are more keywords of `fedda.run`.

With `module` among them, the model is the module of the other peers, through `from_torch`. With
`as_command` among them, JAX is set up and devices are chosen as by the command `fedda run`.
The rounds of one command are one program, as they are between two evaluations of a user's run.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import problem as fedda_problem
import protocol
from protocol import Weights

from fedda import api
from fedda.core import losses
from fedda.models import Model
from fedda.simulate import devices
from fedda.simulate.train import train


def in_half(model: Model) -> Model:
    """The model computes in bfloat16; its weights, their gradients and all sums are float32."""

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tree)

    def apply(params: Any, x: Any) -> Any:
        return model.apply(cast(params), cast(x)).astype(jnp.float32)

    return model._replace(apply=apply)


def main() -> None:
    driver = protocol.Driver()
    problem = protocol.load(sys.argv[1])
    settings = json.loads(sys.argv[2])
    if settings.pop("as_command", False):
        devices.start_up()
        settings.setdefault("devices", None)
    module, x = None, problem.x
    if settings.pop("module", False):
        import nets

        from fedda.models.torch import from_torch, load

        module = nets.build(problem)
        x, model = list(map(nets.channels_first, x)), from_torch(module)
    else:
        model = fedda_problem.model_of(problem)
    if problem.precision == "bf16":
        model = in_half(model)
    clients = list(zip(x, problem.y, strict=True))
    hyper: dict[str, Any] = {"client_lr": problem.rate} | (
        {"beta1": problem.beta1} if problem.algorithm == "fedda-sgdm" else {}
    )

    def evaluations(eval_every: int, rounds: int) -> Iterator[Any]:
        setup, hp = api.prepare(
            problem.algorithm,
            model,
            clients,
            losses.cross_entropy,
            rounds=rounds,
            eval_every=eval_every,
            cohort=problem.cohort,
            batch=problem.batch,
            **protocol.local_work(problem._asdict()),
            **hyper,
            **settings,
        )
        return train(setup, api.traced(hp, model), [fedda_problem.SEED])

    visited, y = np.concatenate(problem.check_x), jnp.asarray(np.concatenate(problem.check_y))
    if module is not None:
        visited = nets.channels_first(visited)
    mean_loss = jax.jit(lambda params: losses.cross_entropy(model.apply(params, visited), y).mean())
    state = {"params": model.init(jax.random.key(0))}

    def loss() -> float:
        return float(mean_loss(jax.device_get(state["params"])))

    def check() -> Weights:
        *_, last = evaluations(eval_every=1, rounds=1)
        state["params"] = last.run.state.params
        if module is not None:
            load(module, jax.device_get(last.run.state.params))
            return nets.extract(module, problem)
        names = fedda_problem.named(jax.device_get(last.run.state.params))
        return {name: np.asarray(leaf) for name, leaf in names.items()}

    runs: dict[int, Iterator[Any]] = {}

    def rounds(number: int) -> None:
        if number not in runs:
            runs[number] = evaluations(eval_every=number, rounds=10**6 * number)
            next(runs[number])  # before the first round
        next(runs[number])  # its row has the training loss, so the rounds are done

    driver.serve(
        problem,
        loss,
        check,
        rounds,
        packages=["fedda", "jax", "flax", "numpy"],
        device=str(jax.devices()),
    )


if __name__ == "__main__":
    main()
