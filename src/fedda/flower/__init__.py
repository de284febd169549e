"""The algorithms of `fedda` as a real federation, on Flower's messages.

`client_app` is a client for any algorithm; `server_app` trains the one that its `Settings` name.
Random numbers, sums and merges are those of a simulation. With the same clients, seed and settings,
a federation and `fedda.run` train the same model, if every client has an example and no reply
exceeds a limit of the `Settings`.
"""

from fedda.flower.client import client_app
from fedda.flower.secure import secure_mods
from fedda.flower.server import Served, serve, server_app
from fedda.flower.settings import Secure, Settings

__all__ = ["Secure", "Served", "Settings", "client_app", "secure_mods", "serve", "server_app"]
