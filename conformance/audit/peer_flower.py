"""Flower: the strategies of its server. Its clients are the user's, here local SGD in NumPy."""

from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedYogi
from flwr.supercore.task_identity import TaskIdentity

from conformance.audit.adapter import PROBLEM, ROUNDS, main
from conformance.problem import mean_gradient


class Nodes:
    """What `Strategy.start` needs of a grid: node i + 1 is client i, while it is in the cohort."""

    def __init__(self, client_lr):
        self.client_lr, self.round, self.models = client_lr, 0, []

    def get_node_ids(self):
        return [client + 1 for client in ROUNDS[self.round]]

    def send_and_receive(self, messages, timeout):
        replies = [self.reply(message) for message in messages]
        self.round += len(replies) > 0  # there are no messages where nothing is evaluated
        return replies

    def reply(self, message):
        rows = ROUNDS[self.round][message.metadata.dst_node_id - 1]
        (W,) = message.content["arrays"].to_numpy_ndarrays()
        for x, y in rows.batches():
            W = W - self.client_lr * mean_gradient(W, x, y)
        metrics = MetricRecord({"num-examples": len(rows.x)})
        content = RecordDict({"arrays": ArrayRecord([W]), "metrics": metrics})
        return Message(content, reply_to=message)

    def evaluate(self, number, arrays):
        self.models += arrays.to_numpy_ndarrays()


def run(strategy, client_lr):
    # Messages carry the numbers of a task, a run and a node, which no server gave out here.
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    nodes = Nodes(client_lr)
    strategy.start(
        nodes,
        ArrayRecord([PROBLEM.weights]),
        num_rounds=len(ROUNDS),
        evaluate_fn=nodes.evaluate,
    )
    return nodes.models[1:]  # without the initial model


def fedopt(strategy, hp, **renamed):
    chosen = {theirs: hp[ours] for theirs, ours in renamed.items()}
    return run(
        strategy(eta=hp["server_lr"], tau=hp["tau"], fraction_evaluate=0.0, **chosen),
        hp["client_lr"],
    )


main(
    "flwr",
    {
        "FedAvg": lambda hp: run(FedAvg(fraction_evaluate=0.0), hp["client_lr"]),
        "FedAvgM": lambda hp: run(
            FedAvgM(
                server_learning_rate=hp["server_lr"],
                server_momentum=hp["beta1"],
                fraction_evaluate=0.0,
            ),
            hp["client_lr"],
        ),
        "FedAdagrad": lambda hp: fedopt(FedAdagrad, hp),
        "FedAdam": lambda hp: fedopt(FedAdam, hp, beta_1="beta1", beta_2="beta2"),
        "FedYogi": lambda hp: fedopt(FedYogi, hp, beta_1="beta1", beta_2="beta2"),
    },
)
