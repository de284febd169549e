"""pfl-research: its algorithms with its simulated backend. It computes updates in float32."""

import tempfile

import torch
import torch.nn.functional as F  # noqa: N812
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.algorithm.fedprox import FedProx, FedProxParams
from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.user_state import DiskUserStateStorage, InMemoryUserStateStorage
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from pfl.stats import MappedVectorStatistics

from conformance.audit.adapter import CLIENTS, ROUNDS, main
from conformance.audit.peer_linear import linear, matrix, tensors


class Network(torch.nn.Module):
    """What pfl asks of a model."""

    def __init__(self):
        super().__init__()
        self.inner = linear()

    def loss(self, x, y):
        return F.cross_entropy(self.inner(x), y)

    def metrics(self, x, y):
        return {}


class Models(TrainingProcessCallback):
    """Keeps the model after each round."""

    def __init__(self):
        self.kept = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.kept.append(matrix(model.pytorch_model.inner.state_dict()))
        return False, Metrics()


def run(algorithm, parameters, hp, optimizer, weighting=(), **chosen):
    network = Network()
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=optimizer(network.parameters()),
    )
    visits = iter([rows for cohort in ROUNDS for rows in cohort.values()])
    # The sampler draws the next client of the schedule, and the data set is that of its visit.
    drawn = []

    def sample():
        drawn.append(next(visits))
        return drawn[-1].client

    def dataset(client):
        assert drawn[-1].client == client
        return Dataset(tensors(drawn[-1]), user_id=str(client))

    federated, models = FederatedDataset(dataset, sample), Models()
    algorithm.run(
        parameters(
            central_num_iterations=len(ROUNDS),
            evaluation_frequency=10**9,
            train_cohort_size=len(ROUNDS[0]),
            val_cohort_size=0,
            **chosen,
        ),
        SimulatedBackend(federated, federated, postprocessors=list(weighting)),
        model,
        NNTrainHyperParams(
            local_learning_rate=hp["client_lr"], local_num_epochs=1, local_batch_size=4
        ),
        callbacks=[models],
        send_metrics_to_platform=False,
    )
    return models.kept


def sgd(hp):
    momentum = hp.get("beta1", 0.0)
    return lambda params: torch.optim.SGD(params, lr=hp["server_lr"], momentum=momentum)


def adagrad(hp):
    # The initial value of v is that of the paper.
    return lambda params: torch.optim.Adagrad(
        params, lr=hp["server_lr"], eps=hp["tau"], initial_accumulator_value=hp["tau"] ** 2
    )


def adam(hp):
    betas = hp["beta1"], hp["beta2"]
    return lambda params: torch.optim.Adam(params, lr=hp["server_lr"], betas=betas, eps=hp["tau"])


def fedavg(optimizer):
    weighting = [WeightByDatapoints()]
    return lambda hp: run(FederatedAveraging(), NNAlgorithmParams, hp, optimizer(hp), weighting)


def fedprox(hp):
    return run(FedProx(), FedProxParams, hp, sgd(hp), [WeightByDatapoints()], mu=hp["mu"])


def scaffold(option_one, storage=InMemoryUserStateStorage):
    return lambda hp: run(
        SCAFFOLD(),
        SCAFFOLDParams,
        hp,
        sgd(hp),
        population=CLIENTS,
        use_gradient_as_control_variate=option_one,
        user_state_storage=storage(),
    )


def on_disk():
    torch.serialization.add_safe_globals([MappedVectorStatistics])  # PyTorch 2.6 asks for this
    return DiskUserStateStorage(tempfile.mkdtemp())


main(
    "pfl",
    {
        "FedAvg": fedavg(sgd),
        "FedAvgM": fedavg(sgd),
        "FedAdagrad": fedavg(adagrad),
        "FedAdam": fedavg(adam),
        "FedProx": fedprox,
        "SCAFFOLD II": scaffold(False),
        "SCAFFOLD I": scaffold(True, on_disk),
        "SCAFFOLD I, in memory": scaffold(True),
    },
)
