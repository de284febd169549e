"""What an algorithm is, one round, local steps and losses."""

from fedda.core import algorithm as algorithm
