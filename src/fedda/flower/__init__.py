"""Deploy the algorithms of `fedda` with Flower.

`client_app` returns a client, and `server_app` a server for the algorithm in its `Settings`. With
the same clients, seed and settings, a deployed federation and `fedda.run` train the same model, if
every client has an example and no reply exceeds a limit of the `Settings`. `FedDA` is a strategy
for Flower projects that have their own training loop.
"""

from fedda.flower.client import client_app
from fedda.flower.secure import secure_mods
from fedda.flower.server import Served, serve, server_app
from fedda.flower.settings import Secure, Settings
from fedda.flower.strategy import FedDA
from fedda.flower.task import task

__all__ = [
    "FedDA",
    "Secure",
    "Served",
    "Settings",
    "client_app",
    "secure_mods",
    "serve",
    "server_app",
    "task",
]
