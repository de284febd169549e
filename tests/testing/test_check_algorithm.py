"""`check_algorithm` accepts the example of an algorithm of one's own, and finds what is wrong."""

import jax.numpy as jnp
import pytest

import fedda
from fedda.errors import InputError
from fedda.testing import check_algorithm
from helpers.pages import ROOT, blocks

(PAGE,) = (
    block.text
    for block in blocks(ROOT / "docs" / "own_algorithm.md", "python")
    if block.caption == "look_ahead.py"
)


def look_ahead(*changes):
    """The algorithm of the page, with other lines."""
    text = PAGE
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    names = {"__name__": "look_ahead", "jnp": jnp}
    exec(text, names)
    return names["algorithm"]


@pytest.mark.slow  # the fast tests run the page itself
def test_the_algorithm_of_the_page_keeps_the_contract():
    check_algorithm(look_ahead())


UPLOAD = "return local.weighted(shard, w), memory, seen"
WRONG = {
    "weak type": (
        [
            ("    move: Any", "    rounds: Any\n    move: Any"),
            ("State(params, tree.zeros_like(params))",
             "State(params, jnp.asarray(0.0), tree.zeros_like(params))"),
            ("State(new, tree.sub", "State(new, state.rounds * jnp.float32(1), tree.sub"),
        ],
        r"\.rounds was float64\[\], now it is|\.rounds was float64\[\] of weak type, now it is",
    ),
    "value": (
        [("    new = local.mean(total)", "    new = local.mean(total) if hp.ahead > 0 else 0")],
        "compiled once for all values, .* such as `if`.* Use jnp.where",
    ),
    "unused": (
        [("tree.axpy(hp.ahead, state.move, state.params)", "state.params")],
        r"ahead of Hyper has no effect: .* the same for 0\.5 and 0\.48\. Use hp\.ahead",
    ),
    "padding": (
        [(UPLOAD, "w = tree.axpy(shard.x.mean(), w, w)\n    " + UPLOAD)],
        r"padding that holds nan changed the result: state.* Use examples only through task",
    ),
    "absent": (
        [(UPLOAD, "w = tree.axpy(shard.x[-5].sum(), w, w)\n    " + UPLOAD)],
        r"the data of clients outside of the cohorts changed the result: .* its own shard",
    ),
    "layout": (
        [(UPLOAD, "w = tree.scale(1 + 0.01 * shard.start.astype(float), w)\n    " + UPLOAD)],
        r"another layout .* changed the result: .* at most 1e-12",
    ),
    "hidden": (
        [(UPLOAD, "import jax\n    w = jax.tree.map(lambda x: jnp.where(abs(x) < 1e9, x, 0.0), w)\n"
          "    seen = jax.tree.map(jnp.nan_to_num, seen)\n    " + UPLOAD)],
        r"0 of its 2 uploads were dropped, expected all\. .* do not use jnp\.nan_to_num",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_is_named(mistake):
    changes, words = WRONG[mistake]
    with pytest.raises(InputError, match=words):
        check_algorithm(look_ahead(*changes))


def test_other_input_is_refused():
    with pytest.raises(InputError, match=r"got str\. .* use fedda.algorithms.get\(name\)"):
        check_algorithm("fedavg")
    with pytest.raises(InputError, match="unknown hyper-parameter in unused 'clientlr'"):
        check_algorithm(fedda.algorithms.get("fedavg"), unused=["clientlr"])
