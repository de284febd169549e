"""FedProx's synthetic(alpha, beta), drawn by `partition_seed`."""

from fedda.data.federation import from_clients
from fedda.data.synthetic import NUM_CLASSES, NUM_FEATURES, generate
from fedda.errors import InputError
from fedda.tasks import Problem
from fedda.tasks.common import Federation, basic_models, chosen_model, classification
from fedda.tasks.config import Config


def build(config: Config) -> Problem:
    model = chosen_model(config, basic_models((NUM_FEATURES,), 64, NUM_CLASSES))
    if config.partition not in ("user", "iid"):
        raise InputError(
            f"partition of synthetic must be user, or iid for clients that are all alike, got "
            f"{config.partition!r}."
        )
    iid = config.partition == "iid"
    alpha, beta = (0 if iid else config.options[f"synthetic_{name}"] for name in ("alpha", "beta"))
    data = generate(alpha, beta, config.clients, config.partition_seed, iid)
    found = Federation(
        shards=from_clients(data.train),
        test=(data.test_x, data.test_y),
        labels=[str(label) for label in range(NUM_CLASSES)],
    )
    return classification(model, found)
