"""The memory that is left is the least of what the host, its containers and its devices say."""

import math
import types

import psutil

from fedda.data import memory


def test_memory_of_the_host(tmp_path, monkeypatch):
    assert 2**28 < memory.of_host() < 2**50
    monkeypatch.setattr(
        psutil, "virtual_memory", lambda: types.SimpleNamespace(available=4 * 10**6)
    )
    assert memory.of_host(tmp_path) == 4 * 10**6
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.of_host(tmp_path) == 4 * 10**6
    (tmp_path / "memory.max").write_text("3000000\n")
    (tmp_path / "memory.current").write_text("2000000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 300000\n")
    assert memory.of_host(tmp_path) == 1_300_000
    (tmp_path / "memory/memory.limit_in_bytes").write_text("100\n")
    (tmp_path / "memory/memory.usage_in_bytes").write_text("120\n")
    (tmp_path / "memory/memory.stat").write_text("total_inactive_file 10\n")
    assert memory.of_host(tmp_path) == 0


def test_memory_of_devices():
    def device(**stats):
        return types.SimpleNamespace(memory_stats=lambda: stats or None)

    full, empty = (device(bytes_limit=100, bytes_in_use=used) for used in (70, 10))
    assert memory.of_devices([full, empty]) == 30
    assert memory.of_devices([device()]) == math.inf, "then only trying helps"
