"""FedProx's synthetic(alpha, beta), drawn by `partition_seed`."""

from fedda.core import losses
from fedda.data.federation import from_clients
from fedda.data.synthetic import NUM_CLASSES, NUM_FEATURES, generate
from fedda.errors import InputError
from fedda.models import linear, mlp
from fedda.tasks import Problem
from fedda.tasks.common import chosen_model
from fedda.tasks.config import Config


def build(config: Config) -> Problem:
    model = chosen_model(
        config,
        {
            "linear": lambda: linear(NUM_FEATURES, NUM_CLASSES),
            "mlp": lambda: mlp(NUM_FEATURES, 64, NUM_CLASSES),
        },
    )
    if config.partition not in ("user", "iid"):
        raise InputError(
            f"partition of synthetic must be user, or iid for clients that are all alike, got "
            f"{config.partition!r}."
        )
    iid = config.partition == "iid"
    alpha, beta = (config.options[f"synthetic_{name}"] for name in ("alpha", "beta"))
    data = generate(
        0 if iid else alpha, 0 if iid else beta, config.clients, config.partition_seed, iid
    )
    return Problem(
        model=model,
        shards=from_clients(data.train),
        test=(data.test_x, data.test_y),
        loss=losses.cross_entropy,
        metrics=(losses.accuracy,),
        higher_is_better=True,
        labels=[str(label) for label in range(NUM_CLASSES)],
    )
