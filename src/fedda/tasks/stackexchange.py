"""Stack Exchange: predict the tags of a post from its bag of words. Each user is a client."""

from fedda.tasks import Problem
from fedda.tasks.config import Config
from fedda.tasks.stackoverflow import tag_prediction


def build(config: Config) -> Problem:
    return tag_prediction("stackexchange", "test", config)
