"""Stack Overflow: predict the tags of a sentence from its bag of words. Each user is a client.

The task `stackexchange` uses this module too.
"""

from functools import partial

from fedda import models
from fedda.core import losses
from fedda.data import preprocessing, streaming
from fedda.data.datasets import open_dataset
from fedda.errors import InputError
from fedda.models import linear
from fedda.tasks import Problem
from fedda.tasks.common import as_stored, chosen_model, provenance
from fedda.tasks.config import Config

VALIDATION = 10_000  # examples, at every evaluation
BLOCK = 8192  # examples of a block of the final evaluation


def build(config: Config) -> Problem:
    return tag_prediction("stackoverflow", config.options["validation"], config)


def tag_prediction(name: str, validation: str, config: Config) -> Problem:
    options = config.options
    vocabulary, tags = options["vocabulary"], options["tags"]
    for key in ("vocabulary", "tags", "cap"):
        if not 1 <= options[key] < 65_534:
            raise InputError(f"{key} must be between 1 and 65533, got {options[key]}.")
    for key, allowed in (("words_counted", ("known", "all")), ("reduction", ("sum", "mean"))):
        if options[key] not in allowed:
            raise InputError(f"{key} must be {' or '.join(allowed)}, got {options[key]!r}.")
    if config.partition != "user":
        raise InputError(f"partition of {name} must be user, got {config.partition!r}.")
    network = chosen_model(config, {"logistic": lambda: linear(vocabulary, tags)})
    store = open_dataset(name)
    if validation not in store.splits:
        raise InputError(
            f"validation must be one of {', '.join(store.splits)}, got {validation!r}."
        )
    bag = partial(
        preprocessing.bag_of_words, vocabulary=vocabulary, denominator=options["words_counted"]
    )
    whole = validation == "test" and store.splits["test"].num_examples <= VALIDATION
    return Problem(
        model=models.with_input(network, bag),
        shards=as_stored(name, store.splits["train"], config, options["cap"]),
        test=streaming.union(store.splits[validation], VALIDATION),
        loss=losses.tag_cross_entropy,
        metrics=(losses.recall_at_5,),
        labels=store.text("tags.txt").splitlines()[:tags],
        reduction=options["reduction"],
        final=None if whole else lambda: streaming.blocks(store.splits["test"], BLOCK),
        data=provenance(name, store) | {"partition": "user", "validation": validation},
    )
