"""Secure aggregation at the client: an upload becomes a vector, which Flower's mod masks."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.clientapp.typing import ClientAppCallable, Mod
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

from fedda.flower.messages import REMEDY, Refused
from fedda.flower.secure import RANGES, fitres, protocol_part


def secure_mods() -> list[Mod]:
    """The mods of a client that gives uploads to sums alone, and refuses to give one in plain.

    What else changes an upload, such as noise, comes after them in the list of mods.
    """
    return [_only_masked, secaggplus_mod, _as_vector]


def _only_masked(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Refuses what the mod would do for any server: to upload in plain, or with too few others."""
    kind = message.metadata.message_type
    if kind.split(".")[0] == MessageType.TRAIN:  # the mod lets train.default through as it is
        if kind != MessageType.TRAIN or RECORD_KEY_CONFIGS not in message.content.config_records:
            raise Refused(
                "an upload in plain was asked for, and this client gives only masked ones"
            )
        asked = protocol_part(message.content)
        if asked.get(Key.STAGE) == Stage.SETUP:
            shares, needed = (asked.get(name) for name in (Key.SHARE_NUMBER, Key.THRESHOLD))
            if type(shares) is not int or type(needed) is not int:
                raise Refused("the setup does not say how secrets are shared")
            if needed < 2 or 2 * needed <= shares:
                raise Refused(f"{needed} of {shares} shares would reveal a secret: too few")
    return call_next(message, context)


def _as_vector(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    """Makes a reply what the mod expects: one vector, and 1 for the number of its examples."""
    if message.metadata.message_type != MessageType.TRAIN:
        return call_next(message, context)
    ranges = message.content.config_records.get(RANGES, ConfigRecord())
    reply = call_next(message, context)
    content = fitres([_vector(reply.content, ranges)])
    content["fedda"] = reply.content["fedda"]
    return Message(content, reply_to=message)


def _vector(content: RecordDict, ranges: Mapping[str, Any]) -> np.ndarray:
    """All entries as parts of their ranges in the order of their names, and the flags."""
    upload, seen = content.array_records["upload"], content.metric_records["seen"]
    entries = {_under("upload", name): _floats(sent.numpy()) for name, sent in upload.items()}
    entries |= {_under("seen", name): np.asarray(value, float) for name, value in seen.items()}
    if set(ranges) != set(entries):
        odd = sorted(set(ranges) ^ set(entries))
        raise Refused(f"the ranges are not those of this upload; the first of them is {odd[0]}")
    vector = np.concatenate([entries[name].ravel() / ranges[name] for name in sorted(ranges)])
    if not np.isfinite(vector).all():
        raise Refused(f"a number of the upload is not finite. {REMEDY}")  # it would spoil the sum
    clipped = bool((np.abs(vector) > 1).any())
    return np.append(vector, [1.0, clipped])


def _floats(array: np.ndarray) -> np.ndarray:
    """In the precision in which the mod quantises best; bfloat16 travels as its bits."""
    return np.asarray(array.view(jnp.bfloat16) if array.dtype == np.uint16 else array, np.float64)


def _under(name: str, path: str) -> str:
    return f"{name}/{path}" if path else name
