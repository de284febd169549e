"""NVIDIA FLARE: its controllers, with clients that use its helpers for PyTorch.

What would travel through a network is handed over here: the controllers' `run` is theirs, and so is
every sum. The clients are written as in its documentation, where the training loop is the user's.
"""

import contextlib
import copy
import importlib
import io
import logging

import torch
import torch.nn.functional as F  # noqa: N812
from nvflare.apis.fl_constant import FLMetaKey
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AlgorithmConstants
from nvflare.app_common.workflows.fedavg import FedAvg
from nvflare.app_common.workflows.scaffold import Scaffold
from nvflare.app_opt.pt.fedopt_ctl import FedOpt
from nvflare.app_opt.pt.fedproxloss import PTFedProxLoss
from nvflare.app_opt.pt.scaffold import PTScaffoldHelper

from conformance.audit.adapter import ROUNDS, main
from conformance.audit.peer_linear import linear, matrix, tensors


def numbers(module):
    return {name: value.numpy().copy() for name, value in module.state_dict().items()}


class Client:
    """A client that takes local SGD steps, with the terms of FedProx or SCAFFOLD."""

    def __init__(self, hp, kind, weight):
        self.hp, self.kind, self.weight, self.module = hp, kind, weight, linear()
        self.proximal = PTFedProxLoss(hp["mu"]) if "mu" in hp else None
        if kind is Scaffold:
            self.scaffold = PTScaffoldHelper()
            self.scaffold.init(self.module)

    def train(self, model, rows):
        module, lr = self.module, self.hp["client_lr"]
        module.load_state_dict({k: torch.as_tensor(v) for k, v in model.params.items()})
        start = copy.deepcopy(module)
        if self.kind is Scaffold:
            self.scaffold.load_global_controls(model.meta[AlgorithmConstants.SCAFFOLD_CTRL_GLOBAL])
            controls = self.scaffold.get_params()
        optimizer = torch.optim.SGD(module.parameters(), lr)
        batches = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tensors(rows)), 4)
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(module(x), y)
            if self.proximal is not None:
                loss = loss + self.proximal(module, start)
            loss.backward()
            optimizer.step()
            if self.kind is Scaffold:
                self.scaffold.model_update(module, lr, *controls)
        counts = {"examples": len(rows.x), "steps": len(batches), "none": None}
        meta = {FLMetaKey.NUM_STEPS_CURRENT_ROUND: counts[self.weight]}
        params, params_type = numbers(module), ParamsType.FULL
        if self.kind is Scaffold:
            self.scaffold.terms_update(module, lr, *controls, start)
            meta[AlgorithmConstants.SCAFFOLD_CTRL_DIFF] = self.scaffold.get_delta_controls()
        if self.kind is FedOpt:
            params, params_type = (
                {name: value - model.params[name] for name, value in params.items()},
                ParamsType.DIFF,
            )
        return FLModel(params=params, params_type=params_type, meta=meta)


def run(controller, hp, weight="examples", **chosen):
    clients = {}

    class Direct(controller):
        """The controller without a network."""

        def sample_clients(self, num_clients=None):
            return [str(client) for client in ROUNDS[self.current_round]]

        def send_model_and_wait(self, task_name="train", data=None, targets=None, **kwargs):
            return [self.answer(int(target), data) for target in targets]

        def send_model(self, task_name, data, targets, callback):
            for target in targets:
                callback(self.answer(int(target), data))

        def answer(self, client, model):
            own = clients.setdefault(client, Client(hp, controller, weight))
            result = own.train(copy.deepcopy(model), ROUNDS[self.current_round][client])
            result.meta["client_name"] = str(client)
            result.current_round = self.current_round
            return result

        def get_num_standing_tasks(self):
            return 0

        def load_model(self):
            return FLModel(params=numbers(linear()), params_type=ParamsType.FULL)

        def save_model(self, model):
            models.append(matrix(model.params))

        def build_component(self, config):
            module, _, name = config["path"].rpartition(".")
            return getattr(importlib.import_module(module), name)(**config["args"])

        def event(self, event_type):
            pass

        def fire_event_with_data(self, *args):
            pass

    models = []
    direct = Direct(num_clients=len(ROUNDS[0]), num_rounds=len(ROUNDS), **chosen)
    direct.fl_ctx = FLContext()
    direct.initialize(direct.fl_ctx)
    direct.run()
    return models


def fedopt(name, **optimizer):
    def trial(hp):
        arguments = {theirs: f(hp) for theirs, f in optimizer.items()}
        # A constant rate: the default is a cosine schedule.
        constant = {"path": "torch.optim.lr_scheduler.ConstantLR", "args": {"factor": 1.0}}
        return run(
            FedOpt,
            hp,
            source_model=linear(),
            device="cpu",
            optimizer_args={
                "path": f"torch.optim.{name}",
                "args": {"lr": hp["server_lr"], **arguments},
            },
            lr_scheduler_args=constant,
        )

    return trial


logging.disable(logging.CRITICAL)
torch.set_default_dtype(torch.float64)
with contextlib.redirect_stdout(io.StringIO()):
    main(
        "nvflare",
        {
            "FedAvg": lambda hp: run(FedAvg, hp),
            "FedAvg, weighted by steps": lambda hp: run(FedAvg, hp, "steps"),
            "FedProx": lambda hp: run(FedAvg, hp, fedprox_mu=hp["mu"]),
            "FedAvgM": fedopt("SGD", momentum=lambda hp: hp["beta1"]),
            "FedAdagrad": fedopt(
                "Adagrad",
                eps=lambda hp: hp["tau"],
                initial_accumulator_value=lambda hp: hp["tau"] ** 2,
            ),
            "FedAdam": fedopt(
                "Adam", betas=lambda hp: (hp["beta1"], hp["beta2"]), eps=lambda hp: hp["tau"]
            ),
            "SCAFFOLD": lambda hp: run(Scaffold, hp, "none"),
        },
    )
