"""The commands for data, as a person or a script uses them."""

import hashlib
import json
import os
import pickle
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

from fedda.data import catalogue, datasets, sandbox
from fedda.data.readers.table import stored_preparation
from fedda.data.tabular import federation
from fedda.errors import InputError
from helpers import hospitals
from helpers.archives import tar_bz2
from helpers.downloads import CONTENT, Server


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path / "root"))
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "root"


def digits_file(path: Path, clients: int) -> bytes:
    """TensorFlow Federated's layout: client k has k + 1 images."""
    with h5py.File(path, "w") as file:
        for k in range(clients):
            group = file.create_group(f"examples/f{k:04}_00")
            group["pixels"] = np.full((k + 1, 28, 28), 1, np.float32)
            group["label"] = np.arange(k + 1, dtype=np.int32)
    return path.read_bytes()


@pytest.fixture
def remote(server: Server, tmp_path: Path, monkeypatch) -> Server:
    """Serves the digits of three writers instead of 3,383."""
    files = {
        f"fed_emnist_digitsonly_{split}.h5": digits_file(tmp_path / "h5", 3)
        for split in ("train", "test")
    }
    checksum = tar_bz2(tmp_path / "archive", files)
    server.content = (tmp_path / "archive").read_bytes()
    (tmp_path / "h5").unlink()
    (tmp_path / "archive").unlink()
    dataset = catalogue.DATASETS["emnist-digits"]
    url, _ = dataset.downloads[0]
    changed = catalogue.Dataset("", dataset.readers, ((url, checksum),))
    monkeypatch.setitem(catalogue.DATASETS, "emnist-digits", changed)
    return server


def mirror(server: Server) -> str:
    return server.url.removesuffix("/file.bin")


def own_file(path: Path) -> Path:
    who = np.array(["ann", "bob", "ann", "bob", "ann"])
    np.savez(path, who=who, kind=np.array([0, 1, 1, 0, 1]), x=np.eye(5, dtype=np.float32))
    return path


def row(out: str, name: str) -> str:
    """A line of the list, with single spaces."""
    (line,) = (line for line in out.splitlines() if line.startswith(f"  {name} "))
    return " ".join(line.split())


def data_table(out: str) -> str:
    return out[out.index("data set ") :]


def test_fetch_downloads_imports_and_keeps(fedda, remote, root):
    code, out, err = fedda("data", "fetch", "emnist-digits", "--mirror", mirror(remote))
    assert code == 0
    assert re.search(r"train +3 +6\b", out)
    assert re.search(r"test +3 +6\b", out)
    assert f"kept in {root / 'downloads' / 'emnist-digits'}" in out
    assert re.search(r"^fed_emnist_digitsonly.tar.bz2: \S+ \w+ of \S+ \w+", err, re.MULTILINE)
    kept = root / "downloads" / "emnist-digits" / "fed_emnist_digitsonly.tar.bz2"
    assert kept.read_bytes() == remote.content
    opened = datasets.open_dataset("emnist-digits")
    assert opened.splits["train"].clients == ["f0000_00", "f0001_00", "f0002_00"]
    code, again, err = fedda("data", "fetch", "emnist-digits")
    assert (code, again, err) == (0, out, "")
    assert len(remote.asked) == 1


def test_a_task_without_files_is_no_name_for_a_table(fedda, tmp_path):
    code, _, err = fedda("data", "import", "digits", str(own_file(tmp_path / "mine.npz")))
    assert code == 2
    assert "digits is a task that reads no files. Choose another name" in err


def test_import_of_a_federation_of_ones_own(fedda, tmp_path):
    file = own_file(tmp_path / "mine.npz")
    code, out, _ = fedda(
        "data", "import", "mine", str(file), "--client", "who", "--label", "kind", "--feature", "x"
    )
    assert code == 0
    assert re.search(r"train +2 ", out)
    opened = datasets.open_dataset("mine")
    assert opened.splits["train"].clients == ["ann", "bob"]
    assert opened.meta["origin"]["options"] == {"client": "who", "label": "kind", "features": ["x"]}
    code, out, _ = fedda("data", "list")
    assert re.match(r"mine 2 clients, [45] examples, \d+ bytes, from", row(data_table(out), "mine"))


def test_a_csv_file_is_prepared_as_by_federation_and_trained_on(fedda, tmp_path, monkeypatch):
    hospitals.write_csv(tmp_path / "visits.csv", rows=400)
    columns = {"client": "hospital", "label": "outcome"}
    words = ("--client", "hospital", "--label", "outcome")
    code, out, _ = fedda("data", "import", "mine", str(tmp_path / "visits.csv"), *words)
    assert code == 0
    made = federation(tmp_path / "visits.csv", **columns)
    assert repr(made.preparation) in out
    opened = datasets.open_dataset("mine")
    assert stored_preparation(opened) == made.preparation
    assert opened.splits["train"].clients == made.names
    for number, (x, y) in enumerate(made.clients):
        np.testing.assert_array_equal(opened.splits["train"].column("x", number), x)
        np.testing.assert_array_equal(opened.splits["train"].column("y", number), y)
    assert opened.text("labels.txt").splitlines() == ["ill", "well"]
    monkeypatch.chdir(tmp_path)
    words = ("task=own", "data=mine", "rounds=2", "per_client=true", "--out", "out")
    code, out, err = fedda("run", *words)
    assert code == 0, err
    clients = out.partition(f"{len(made.names)} clients, ")[2]
    assert re.search(r"accuracy +[\d.]+ +[\d.]+ +[\d.]+\n", clients), "mean, spread, worst tenth"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    found = summary["per_client"]
    assert (found["on"], found["clients"]) == ("test", made.names)
    assert found["examples"] == [len(y) for _, y in made.test]
    right = np.dot(found["examples"], [value or 0 for value in found["metrics"]["accuracy"]])
    assert right / sum(found["examples"]) == pytest.approx(summary["final"]["accuracy"])
    assert json.dumps(summary["data"]["preparation"], indent=1) == made.preparation.to_json()


def test_options_of_a_table_reach_its_reader_and_the_advice_to_repeat_it(fedda, tmp_path):
    text = "client,label,f,id\n" + "".join(f"{i % 2},{i % 3},{i},p{i}\n" for i in range(300))
    (tmp_path / "t.csv").write_text(text)
    words = ("data", "import", "mine", str(tmp_path / "t.csv"))
    code, _, err = fedda(*words)
    assert code == 2
    assert "column 'id' holds text with 240 different values" in err
    options = ("--no-prepare", "--ignore", "id", "--target", "numbers")
    assert fedda(*words, *options)[0] == 0
    train = datasets.open_dataset("mine").splits["train"]
    assert train.fields["y"].values.shape == (240, 1)
    assert train.fields["x"].values.max() > 290, "as it was"
    assert shlex.join(options) in datasets.repair("mine")


def test_a_data_set_of_other_files_is_replaced_only_if_that_is_asked_for(fedda, tmp_path):
    first, second = (own_file(tmp_path / f"{name}.npz") for name in ("first", "second"))
    words = ("data", "import", "mine")
    columns = ("--client", "who", "--label", "kind")
    before = fedda(*words, str(first), *columns)
    assert fedda(*words, str(first), *columns)[:2] == before[:2], "once more is harmless"
    code, out, err = fedda(*words, str(second), *columns)
    assert (code, out) == (2, "")
    assert f"there is a data set mine already, from {first}." in err
    assert "Choose another name, or replace it with --replace." in err
    assert datasets.look("mine").origin["path"] == str(first)
    assert fedda(*words, str(second), *columns, "--replace")[0] == 0
    assert datasets.look("mine").origin["path"] == str(second)
    assert fedda(*words, str(second), *columns, "--feature", "x")[0] == 0
    assert datasets.look("mine").origin["options"]["features"] == ["x"], "other columns"


def test_what_cannot_be_read_may_be_replaced(fedda, root, tmp_path):
    first, second = (own_file(tmp_path / f"{name}.npz") for name in ("first", "second"))
    columns = ("--client", "who", "--label", "kind")
    fedda("data", "import", "mine", str(first), *columns)
    (root / "mine" / "train" / "y.values").unlink()
    assert fedda("data", "import", "mine", str(second), *columns)[0] == 0
    assert datasets.look("mine").origin["path"] == str(second)


def test_limits_are_told_in_the_help_and_may_be_raised(fedda, tmp_path, monkeypatch):
    words = " ".join(re.sub("[│╭╮╰╯─]", " ", fedda("data", "import", "--help")[1]).split())
    assert words.count("grows with the files") == 2
    given = []

    def call(function, arguments, what, limits, tell):
        given.append(limits)
        raise InputError("no.")

    monkeypatch.setattr(sandbox, "call", call)
    file = own_file(tmp_path / "mine.npz")
    fedda("data", "import", "mine", str(file), "--memory", "7", "--minutes", "3")
    assert given == [(7 * 10**9, 180)]


def test_progress_of_the_child_process_is_shown(fedda, tmp_path):
    file = own_file(tmp_path / "mine.npz")
    _, _, err = fedda("data", "import", "mine", str(file), "--client", "who", "--label", "kind")
    assert err == "mine: reading mine.npz\n", "the first message; others come every ten seconds"


def test_a_path_that_is_not_utf8_can_be_printed(fedda, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    folder.mkdir()
    own_file(folder / "mine.npz")
    datasets.import_files("mine", folder, client="who", label="kind")
    assert r"caf\udce9" in fedda("data", "list")[1]


def test_list_says_what_is_ready_stale_or_not_here(fedda, root, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    for name in ("first", "second"):
        file = own_file(tmp_path / f"{name}.npz")
        fedda("data", "import", name, str(file), "--client", "who", "--label", "kind")
    own_file(tmp_path / "second.npz")
    os.utime(tmp_path / "second.npz", ns=(1, 1))
    code, out, _ = fedda("data", "list")
    assert code == 0
    for task in ("digits", "emnist", "own"):
        assert re.search(rf"^ +{task} ", out, re.MULTILINE)
    table = data_table(out)
    assert row(table, "first").endswith(f" bytes, from {tmp_path / 'first.npz'}")
    assert row(table, "second") == f"second stale, from {tmp_path / 'second.npz'}"
    assert row(table, "emnist") == "emnist no: fedda data fetch emnist"
    assert row(table, "stackexchange") == "stackexchange no: fedda data import stackexchange"
    assert f"second is stale and not read: the files in {tmp_path / 'second.npz'} have ch" in out
    assert f"kept in {root}" in out


def test_verify_reads_every_byte(fedda, root, tmp_path):
    for name in ("first", "second"):
        file = own_file(tmp_path / f"{name}.npz")
        fedda("data", "import", name, str(file), "--client", "who", "--label", "kind")
    code, out, _ = fedda("data", "verify")
    assert code == 0
    assert [line.split(":")[0] for line in out.splitlines()] == ["first", "second"]
    file = root / "first" / "train" / "y.values"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(content)
    code, out, err = fedda("data", "verify")
    assert code == 2
    assert "second: " in out
    assert "y.values has sha256" in err
    assert fedda("data", "verify", "second")[0] == 0
    assert fedda("data", "verify", "first")[0] == 2
    (advice,) = re.findall(r"which replaces it: fedda (.*)", err)
    assert fedda(*shlex.split(advice))[0] == 0
    assert fedda("data", "verify", "first")[0] == 0


def test_data_show(fedda, tmp_path):
    code, out, _ = fedda("data", "show", "digits", "--partition", "dirichlet:0.3")
    assert code == 0
    assert re.search(r"clients +100 ", out)
    assert re.search(r"examples +1,438 ", out)
    assert (tmp_path / "digits-dirichlet-0.3.png").read_bytes()[:4] == b"\x89PNG"
    code, *_ = fedda("data", "show", "digits", "--partition", "pachinko", "--picture", "p.pdf")
    assert code == 0
    assert (tmp_path / "p.pdf").read_bytes()[:4] == b"%PDF"


def test_help_says_that_data_show_writes_a_file_and_where(fedda):
    help_text = " ".join(fedda("data", "show", "--help")[1].split())
    assert "written to a file in the current folder, or to the file of --picture" in help_text


def test_data_show_says_how_the_clients_came_about(fedda, tmp_path):
    """CIFAR-100 for Python knows no clients, so the task's own partition becomes Pachinko."""
    rng = np.random.default_rng(0)
    for split in ("train", "test"):
        table = {
            "data": rng.integers(0, 256, (600, 3072), np.uint8),
            "fine_labels": [label % 100 for label in range(600)],
            "coarse_labels": [label % 100 // 5 for label in range(600)],
        }
        (tmp_path / "cifar").mkdir(exist_ok=True)
        (tmp_path / "cifar" / split).write_bytes(pickle.dumps(table, protocol=2))
    _, out, _ = fedda("data", "import", "cifar100", "cifar")
    assert re.search(r"train +undivided +600 ", out)
    _, out, _ = fedda("data", "list")
    assert row(data_table(out), "cifar100").startswith("cifar100 undivided, 600 examples, ")
    code, out, _ = fedda("data", "show", "cifar100", "--clients", "60")
    assert code == 0
    assert re.search("cifar100, pachinko:0.1", out)
    assert "Drawn in cifar100-pachinko-0.1.png" in out
    assert "cap=" not in out


def test_data_show_says_where_counts_end(fedda, tmp_path):
    question = 'PostTypeId="1" Title="t" Tags="&lt;a&gt;" Body="b"'
    rows = [
        f'<row Id="{post}" OwnerUserId="{user}" {question}/>'
        for user in (1, 2, 10)
        for post in range(200 * user, 200 * user + (150 if user == 1 else 3))
    ]
    (tmp_path / "beer").mkdir()
    (tmp_path / "beer" / "Posts.xml").write_text(f"<posts>{''.join(rows)}</posts>")
    fedda("data", "import", "stackexchange", "beer")
    code, out, _ = fedda("data", "show", "stackexchange")
    assert code == 0
    assert re.search(r"of a client: most +100 ", out)
    assert "Examples are counted up to cap=100 a client." in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["fetch", "emnits"], "unknown data set 'emnits'. Did you mean emnist"),
        (["fetch", "stackexchange"], "Extract Posts.xml"),
        (
            ["fetch", "emnist", "--mirror", "file:///tmp"],
            "expected an address such as https://host/folder/file",
        ),
        (["fetch", "emnist", "--mirror", "http://127.0.0.1:9/x"], "--mirror URL, or down"),
        (["import", "emnist", "nowhere"], "nowhere does not exist"),
        (["import", "emnist", "nowhere", "--label", "l"], "Leave out: --label"),
        (["import", "a/b", "nowhere"], "'a/b' cannot be the name of a data set"),
        (["verify", "emnist"], "the data set emnist (handwritten digits and letters of 3,400 wr"),
        (["verify", "emist"], "unknown data set 'emist'. Did you mean emnist"),
        (["verify", "mine"], "Import it: fedda data import mine PATH"),
        (["show", "digits", "--picture", "a.xyz"], "must be a .png or .pdf file"),
        (["show", "digits", "--picture", "/proc/a.png"], "cannot write to /proc/a.png"),
        (
            ["show", "emnist-digts"],
            "unknown task or data set 'emnist-digts'. Did you mean emnist-d",
        ),
    ],
)
def test_wrong_input_is_a_message(fedda, tmp_path, words, message):
    code, out, err = fedda("data", *words)
    assert code == 2
    assert out == "" or words[0] == "show"
    assert message in err
    assert "Traceback" not in err
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "nothing is left behind"


def test_a_folder_of_data_that_cannot_be_written_is_said(fedda, monkeypatch):
    monkeypatch.setenv("FEDDA_DATA", "/proc/none")
    code, _, err = fedda("data", "fetch", "emnist", "--mirror", "http://127.0.0.1:9/x")
    assert code == 2
    told = "cannot write to /proc/none (No such file or directory). Give another folder with the"
    assert f"{told} environment variable FEDDA_DATA." in err


def test_the_list_fits_sixty_columns(fedda, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    lines = fedda("data", "list")[1].split("The data sets are kept")[0].splitlines()
    assert max(map(len, lines)) <= 60
    assert "  emnist         no: fedda data fetch emnist" in [line.rstrip() for line in lines]


def on_a_terminal(words: list[str], tmp_path: Path, until: bytes) -> tuple[int, str]:
    """Runs the command in a real terminal (a pty); interrupts it when it shows `until`."""
    main, worker = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "fedda", "data", *words],
        cwd=tmp_path,
        stdin=worker,
        stdout=worker,
        stderr=worker,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(worker)
    shown, deadline, interrupted = b"", time.monotonic() + 300, False
    while time.monotonic() < deadline:
        try:
            shown += os.read(main, 4096)
        except OSError:  # the other end is closed: the process has ended
            break
        if until in shown and not interrupted:
            process.send_signal(signal.SIGINT)
            interrupted = True
    os.close(main)
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode()
    return process.wait(60), text


def test_on_a_terminal_there_is_a_bar_and_ctrl_c_can_be_followed_up(fedda, server, tmp_path, root):
    """The server does not have the real file, so that in the end the checksum is wrong."""
    words = ["fetch", "emnist", "--mirror", mirror(server)]
    server.slow = 0.3  # 9 s in all
    code, text = on_a_terminal(words, tmp_path, until=b"B/s")
    assert code == 130
    told = r"fed_emnist.tar.bz2 .* [0-9.]+ kB of 300.0 kB, [0-9.]+ [kM]?B/s"
    assert re.search(told, text), "file, amount and speed"
    assert "Continue with: fedda data fetch emnist" in text
    assert "Traceback" not in text
    part = root / "downloads" / "emnist" / "fed_emnist.tar.bz2.part"
    kept = part.stat().st_size
    assert part.read_bytes() == CONTENT[:kept]
    server.slow = 0
    server.asked.clear()
    code, _, err = fedda("data", *words)
    assert [asked["Range"] for asked in server.asked] == [f"bytes={kept}-"]
    assert code == 2
    assert hashlib.sha256(CONTENT).hexdigest() in err
    assert not list(part.parent.iterdir())


def test_the_stale_are_made_anew_or_refused_by_what_uses_them(fedda, root, tmp_path):
    file = own_file(tmp_path / "mine.npz")
    fedda("data", "import", "mine", str(file), "--client", "who", "--label", "kind")
    meta = json.loads((root / "mine" / "meta.json").read_text())
    (root / "mine" / "meta.json").write_text(json.dumps(meta | {"version": 0}))
    assert "mine stale, from" in row(data_table(fedda("data", "list")[1]), "mine")
    code, _, err = fedda("data", "verify", "mine")
    assert code == 2
    assert "another version" in err
    datasets.open_dataset("mine")
    assert fedda("data", "verify", "mine")[0] == 0
