"""The format of checkpoints: what is read is what was written, or it is refused."""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedda.errors import InputError
from fedda.simulate.client_state import HostMemory
from fedda.storage import checkpoint

NOTES = {"progress": {"words": "Ü\n", "numbers": [1, 0.1, float("nan"), None]}}


class State(NamedTuple):
    params: Any
    step: Any


def saved(path: Path, run: Any, like: Any) -> Any:
    """The tree that is read back from a file."""
    checkpoint.write(path, 7, checkpoint.on_host(run), NOTES)
    number, arrays, notes = checkpoint.decode(checkpoint.read(path))
    assert number == 7
    assert str(notes) == str(NOTES)
    return checkpoint.restored(arrays, like, "", "")


@pytest.mark.parametrize(
    "dtype",
    [
        *("float32", "float16", "bfloat16", "float8_e4m3fn", "int32", "int8", "uint32", "bool"),
        "complex64",
    ],
)
def test_every_type_comes_back_bit_by_bit(dtype: str, tmp_path: Path):
    numbers = jnp.arange(-3, 9).reshape(3, 4).astype(dtype)
    run = State({"matrix": numbers, "one": numbers[0, 0], "none": numbers[:0]}, jnp.int32(5))
    found = saved(tmp_path / "file", run, jax.eval_shape(lambda: run))
    assert jax.tree.structure(found) == jax.tree.structure(run)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(run), strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert ours.tobytes() == np.asarray(theirs).tobytes()


def test_numpy_keeps_its_types_and_any_layout(tmp_path: Path):
    """Where 64-bit numbers are off, JAX would make float32 of them."""
    run = {"wide": np.arange(6.0).reshape(2, 3).T, "every second": np.arange(10)[::2]}
    found = saved(tmp_path / "file", run, run)
    for name, array in run.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_random_keys_come_back(impl: str, tmp_path: Path):
    run = {"one": jax.random.key(3, impl=impl), "more": jax.random.split(jax.random.key(4), 3)}
    found = saved(tmp_path / "file", run, jax.eval_shape(lambda: run))
    for name, keys in run.items():
        assert (found[name].dtype, found[name].shape) == (keys.dtype, keys.shape)
        draws = (
            jax.random.normal(each, (2,)) for each in (found[name].ravel()[0], keys.ravel()[0])
        )
        np.testing.assert_array_equal(*draws)


def test_memory_of_visited_clients_may_have_grown(tmp_path: Path):
    blank = {"w": np.zeros((4, 2), np.float32), "count": np.int32(0)}
    memory = HostMemory(blank)
    new = {"w": np.ones((3, 4, 2), np.float32), "count": np.arange(3, dtype=np.int32)}
    memory.put(np.array([5, 9, 2]), new)
    run = {"memory": memory, "step": np.int32(1)}
    like = {"memory": HostMemory(blank), "step": np.int32(0)}
    found = saved(tmp_path / "file", run, like)["memory"]
    clients = np.array([2, 3, 5, 9])
    for ours, theirs in zip(
        jax.tree.leaves(found.take(clients)), jax.tree.leaves(memory.take(clients)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_a_copy_is_saved_of_what_programs_reuse():
    array = jnp.arange(3.0)
    (copy,) = checkpoint.on_host(array).values()
    assert not np.shares_memory(copy, np.asarray(array))


W, V = jnp.zeros((2, 3)), jnp.zeros(3)


@pytest.mark.parametrize(
    ("like", "message"),
    [
        (
            {"v": V.astype("int32"), "w": W},
            r"in it \['v'\] is float32\[3\], here int32\[3\]\. Do",
        ),
        ({"v": V, "w": W.T}, r"in it \['w'\] is float32\[2, 3\], here float32\[3, 2\]"),
        ({"v": jnp.zeros(4), "w": W}, r"in it \['v'\] is float32\[3\], here float32\[4\]"),
        ({"v": V}, r"in it \['w'\] is float32\[2, 3\], here absent"),
        ({"u": V, "w": W}, r"in it \['u'\] is absent, here float32\[3\]"),
        ({"v": jnp.zeros((0, 3)), "w": W}, r"in it \['v'\] is float32\[\], here float32\[3\]"),
    ],
)
def test_another_model_is_refused(like: Any, message: str):
    with pytest.raises(InputError, match=f"^The run is of another .*{message}"):
        checkpoint.restored(checkpoint.on_host({"v": V, "w": W}), like, "The run", "Do so.")


def test_every_bit_of_a_file_counts(tmp_path: Path):
    path = tmp_path / "file"
    checkpoint.write(path, 0, checkpoint.on_host({"w": jnp.arange(3)}), NOTES)
    whole = path.read_bytes()
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(InputError, match=f"{path} is damaged: its checksum does not match"):
            checkpoint.read(path)
        path.write_bytes(whole[:place])
        with pytest.raises(InputError, match="is damaged"):
            checkpoint.read(path)


def test_a_digest_tells_trees_apart():
    trees = [
        {"w": jnp.zeros(4)},
        {"w": jnp.zeros((2, 2))},
        {"w": jnp.zeros(4, "int32")},
        {"w": jnp.arange(4.0)},
        {"w": jax.random.key(0)},
        {"w": jax.random.key(1)},
        {"w": np.zeros(4)},
    ]
    assert len(set(map(checkpoint.digest, trees))) == len(trees)
    assert checkpoint.digest(trees[0]) == checkpoint.digest({"w": np.zeros(4, np.float32)})
