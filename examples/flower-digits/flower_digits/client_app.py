"""A client: it has its share of the digits, and works for whatever algorithm the server names."""

from fedda.flower import client_app
from flwr.app import Context

from flower_digits.problem import TASK, Examples, share


def data(context: Context) -> Examples:
    """Where this node's own data would be read."""
    node = context.node_config
    return share(int(node["partition-id"]), int(node["num-partitions"]))


app = client_app(TASK, data)
