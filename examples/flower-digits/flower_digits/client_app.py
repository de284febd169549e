"""A client with its share of the digits. The server chooses the algorithm."""

from fedda.flower import client_app
from flwr.app import Context

from flower_digits.problem import TASK, Examples, share


def data(context: Context) -> Examples:
    """Return the examples of this node. A real node would read its own data here."""
    node = context.node_config
    return share(int(node["partition-id"]), int(node["num-partitions"]))


app = client_app(TASK, data)
