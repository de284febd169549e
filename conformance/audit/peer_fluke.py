"""fluke: the servers and clients of its algorithms, in its own loop."""

import sys
from unittest.mock import MagicMock

# fluke imports this for data sets and models that are not used here, and the package index has no
# build of it for a PyTorch without CUDA.
for name in ("", ".datasets", ".datasets.utils", ".models", ".transforms"):
    sys.modules[f"torchvision{name}"] = MagicMock()

import torch  # noqa: E402
from fluke import DDict, FlukeENV  # noqa: E402
from fluke.algorithms.fedavg import FedAVG  # noqa: E402
from fluke.algorithms.fedavgm import FedAVGM  # noqa: E402
from fluke.algorithms.fedopt import FedOpt  # noqa: E402
from fluke.algorithms.fedprox import FedProx  # noqa: E402
from fluke.algorithms.scaffold import SCAFFOLD  # noqa: E402
from fluke.data import DataSplitter, DummyDataContainer, FastDataLoader  # noqa: E402

from conformance.audit.adapter import CLIENTS, ROUNDS, main  # noqa: E402
from conformance.audit.peer_linear import linear, matrix, tensors  # noqa: E402


def loader(rows):
    return FastDataLoader(*tensors(rows), num_labels=3, batch_size=4, skip_singleton=False)


class Rounds:
    """The cohorts and batches of the vectors, and the model after each round."""

    def __init__(self, algorithm):
        self.algorithm, self.server, self.number, self.models = algorithm, algorithm.server, 0, []
        self.aggregate = self.server.aggregate
        self.server.get_eligible_clients = self.cohort
        self.server.aggregate = self.aggregated

    def cohort(self, share):
        found = []
        for client, rows in ROUNDS[self.number].items():
            self.algorithm.clients[client].train_set = loader(rows)
            found.append(self.algorithm.clients[client])
        return found

    def aggregated(self, clients, models):
        self.aggregate(clients, models)
        self.models.append(matrix(self.server.model.state_dict()))
        self.number += 1


def run(algorithm, hp, client=(), **server):
    some = loader(next(iter(ROUNDS[0].values())))
    data = DummyDataContainer([some] * CLIENTS, [None] * CLIENTS, None, 3)
    chosen = DDict(
        model=linear(),
        client=DDict(
            batch_size=4,
            local_epochs=1,
            loss="CrossEntropyLoss",
            optimizer=DDict(name="SGD", lr=hp["client_lr"]),
            scheduler=DDict(name="StepLR", step_size=1, gamma=1),
            **dict(client),
        ),
        server=DDict(**server),
    )
    made = algorithm(CLIENTS, DataSplitter(dataset=data, distribution=None), chosen)
    rounds = Rounds(made)
    made.run(len(ROUNDS), len(ROUNDS[0]) / CLIENTS, finalize=False)
    return rounds.models


def fedopt(mode):
    return lambda hp: run(
        FedOpt,
        hp,
        mode=mode,
        lr=hp["server_lr"],
        beta1=hp["beta1"],
        beta2=hp.get("beta2", 0.0),
        tau=hp["tau"],
        weighted=True,
    )


torch.set_default_dtype(torch.float64)
FlukeENV().set_device("cpu")
FlukeENV().set_eval_cfg(pre_fit=False, post_fit=False, locals=False, server=False)
main(
    "fluke-fl",
    {
        "FedAvg": lambda hp: run(FedAVG, hp, weighted=True, lr=hp["server_lr"]),
        "FedProx": lambda hp: run(FedProx, hp, {"mu": hp["mu"]}, weighted=True, lr=hp["server_lr"]),
        "FedAvgM": lambda hp: run(FedAVGM, hp, weighted=True, momentum=hp["beta1"]),
        "FedAdagrad": fedopt("adagrad"),
        "FedAdam": fedopt("adam"),
        "FedYogi": fedopt("yogi"),
        "SCAFFOLD": lambda hp: run(SCAFFOLD, hp, weighted=False, lr=hp["server_lr"]),
        "SCAFFOLD, global_step": lambda hp: run(
            SCAFFOLD, hp, weighted=False, global_step=hp["server_lr"]
        ),
        "SCAFFOLD, weighted": lambda hp: run(SCAFFOLD, hp, weighted=True, lr=hp["server_lr"]),
    },
)
