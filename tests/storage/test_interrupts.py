"""Ctrl-C and SIGTERM: none is lost, and a second one ends the process at once."""

import os
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from fedda.cli import terminal
from fedda.errors import InputError
from fedda.storage import interrupts
from fedda.storage.files import naming

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def never(*_: object) -> None:
    raise AssertionError("there was no second signal")


def handlers():
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.fixture(autouse=True)
def _handlers_are_restored():
    before = handlers()
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


def signal_in_a_callback(number):
    """A signal that comes where Python drops exceptions, as in a callback of the compiler."""

    class Dropped:
        pass

    dropped = Dropped()
    finalizer = weakref.ref(dropped, lambda _: signal.raise_signal(number))
    del dropped
    assert finalizer() is None


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_in_a_callback_is_not_lost(number, capsys):
    def train():
        with terminal.training(lambda: "Continue with: it"):
            signal_in_a_callback(number)
            interrupts.check()
            pytest.fail("the run goes on")

    with pytest.raises(SystemExit) as stop:
        train()
    assert stop.value.code == 128 + number
    word = {signal.SIGINT: "Interrupted", signal.SIGTERM: "Terminated"}[number]
    assert capsys.readouterr().err == f"{word}. Continue with: it\n"


def test_a_signal_at_the_end_of_the_work_is_not_lost():
    with pytest.raises(interrupts.Interrupted), interrupts.watched(SIGNALS, never, never):
        signal.raise_signal(signal.SIGINT)


def test_signals_are_left_as_they_were():
    before = handlers()
    with interrupts.watched(SIGNALS, never, never):
        assert handlers() != before
    assert handlers() == before
    threads = threading.active_count()
    with pytest.raises(interrupts.Interrupted), interrupts.watched(SIGNALS, never, never):
        signal.raise_signal(signal.SIGTERM)
    assert (handlers(), threading.active_count()) == (before, threads)
    interrupts.check()  # of a signal that is over


def test_a_signal_that_is_ignored_stays_so():
    """As Ctrl-C is in what a shell starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interrupts.watched(SIGNALS, never, never):
        signal.raise_signal(signal.SIGINT)
        interrupts.check()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_thread_handles_no_signals():
    before, seen = handlers(), []

    def work():
        with interrupts.watched(SIGNALS, never, never), interrupts.critical():
            seen.extend(handlers())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == before


def test_work_that_is_held_back_stops_when_it_asks():
    def train():
        with interrupts.held_back() as came:
            assert not came()
            signal.raise_signal(signal.SIGINT)
            assert came()
            interrupts.check()  # not yet
        pytest.fail("the signal takes effect at the end of the block")

    with pytest.raises(interrupts.Interrupted), interrupts.watched(SIGNALS, never, never):
        train()


def test_a_person_is_told_why_a_signal_is_held_back(monkeypatch):
    monkeypatch.setattr(interrupts, "PATIENCE", 0.01)
    told = threading.Event()

    def train():
        with interrupts.held_back():
            signal.raise_signal(signal.SIGINT)
            assert told.wait(10)

    with pytest.raises(interrupts.Interrupted), interrupts.watched(SIGNALS, told.set, never):
        train()


def test_a_second_signal_is_not_held_back():
    ended = threading.Event()

    def train():
        with interrupts.held_back():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert ended.wait(10)

    with (
        pytest.raises(interrupts.Interrupted),
        interrupts.watched(SIGNALS, never, lambda number: ended.set()),
    ):
        train()


@pytest.mark.parametrize("numbers", [[signal.SIGINT], [signal.SIGTERM, signal.SIGINT]])
def test_what_must_be_whole_is_finished_before_the_process_is_ended(monkeypatch, numbers):
    """Also for a checkpoint that is written in the background."""
    ended, order = threading.Event(), []

    def end(number):
        order.append(number)
        ended.set()

    def wait():
        time.sleep(0.02)
        order.append("background")

    def save():
        with interrupts.critical():
            for number in numbers:
                signal.raise_signal(number)
            assert not ended.wait(0.05)
            order.append("critical")
        assert ended.wait(10)

    monkeypatch.setattr(interrupts, "PATIENCE", 0.01 if len(numbers) == 1 else 60)
    monkeypatch.setattr(interrupts, "finish_first", [wait])
    with pytest.raises(interrupts.Interrupted), interrupts.watched(SIGNALS, never, end):
        save()
    assert order == ["critical", "background", signal.SIGINT]


BUSY = """
import hashlib
from fedda.cli import terminal

with terminal.training(lambda: "Continue with: it"):
    print("begun", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 10**9)  # as the compiler does, it keeps Python waiting
"""


@pytest.mark.parametrize("read", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_signal_soon_ends_a_process_that_is_busy_in_compiled_code(read: bool):
    """Also if nobody reads what it says, as when Ctrl-C has ended `tee`, too."""
    process = subprocess.Popen(
        [sys.executable, "-c", BUSY],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        if not read:
            process.stderr.close()
        process.send_signal(signal.SIGINT)
        process.wait(timeout=60)
        told = process.stderr.read() if read else ""
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()
    assert process.returncode == 130
    assert told == ("Interrupted. Continue with: it\n" if read else "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has it")
def test_a_full_disk_is_told_with_the_file_and_how_to_go_on():
    told = r"^cannot write to run/log \(No space left on device\)\. Free some space there\. Go on$"
    with (
        pytest.raises(InputError, match=told),
        terminal.training(lambda: "Go on"),
        naming("run/log"),
        open("/dev/full", "wb", buffering=0) as file,
    ):
        file.write(b"row")
