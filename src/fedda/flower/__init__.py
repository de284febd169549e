"""The same algorithms as a real federation, on Flower's messages.

`client_app` serves whatever algorithm it is asked for; `server_app` runs one as its `Settings` say.
Random numbers, sums and merges are those of a simulation: with the same clients, seed and settings
a federation and `fedda.run` come to the same model, if every client has an example and no reply
exceeds a limit of the `Settings`.
"""

from fedda.flower.client import client_app
from fedda.flower.masking import secure_mods
from fedda.flower.secure import Secure
from fedda.flower.server import Served, serve, server_app
from fedda.flower.settings import Settings

__all__ = [
    "Secure",
    "Served",
    "Settings",
    "client_app",
    "secure_mods",
    "serve",
    "server_app",
]
