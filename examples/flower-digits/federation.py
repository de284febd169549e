"""Run the app in a Flower federation on this machine: a SuperLink and SuperNodes, under TLS.

    python federation.py                                   three nodes and one run
    python federation.py --nodes 5 algorithm=fedda-adam rounds=5

At the end all processes are stopped, and certificate, keys and Flower's files are deleted. The
results of a run stay in its folder `out`. The class can also be used from Python:

    with Federation(directory) as federation:
        print(federation.run({"algorithm": "fedda-adam", "rounds": 5}))
"""

import argparse
import datetime
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

APP = Path(__file__).parent
COMMANDS = Path(sys.executable).parent  # where Flower's commands are
LINK = "loopback"  # the name of the SuperLink in Flower's configuration


class FlowerFailedError(RuntimeError):
    """A Flower command, or a run, failed; the message is what it printed."""


def make_certificate(directory: Path) -> Path:
    """Make a self-signed certificate for the loopback address; its key is `server.key`."""
    directory.mkdir(parents=True)
    key, now = ec.generate_private_key(ec.SECP384R1()), datetime.datetime.now(datetime.UTC)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder(subject_name=name, issuer_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost"), address]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA384())
    )
    (directory / "server.pem").write_bytes(certificate.public_bytes(Encoding.PEM))
    _write_key(directory / "server.key", key, PrivateFormat.TraditionalOpenSSL)
    return directory / "server.pem"


def make_key(path: Path) -> Path:
    """Make the private key of a node; its public key has the suffix `.pub`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    _write_key(path, key, PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    path.with_suffix(".pub").write_bytes(public)
    return path


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> None:
    path.touch(mode=0o600)
    path.write_bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))


def free_port() -> int:
    """Return a port of the loopback address at which nobody listens."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Federation:
    """A SuperLink and its SuperNodes, which run while the context is open.

    Args:
        directory: For the certificate, keys, logs, and the files of each process.
        nodes: Number of SuperNodes.
        app: The Flower app to run.
        tls: Whether to encrypt messages and to authenticate nodes. Flower can authenticate nodes
            only if messages are encrypted.
        environment: More environment variables of the processes.
    """

    def __init__(
        self,
        directory: Path,
        nodes: int = 3,
        app: Path = APP,
        tls: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory, self.nodes, self.app = directory.absolute(), nodes, app
        self.environment = dict(environment or {})
        self.certificate = make_certificate(self.directory / "tls") if tls else None
        self.address = f"127.0.0.1:{free_port()}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        trust = f'root-certificates = "{self.certificate}"' if tls else "insecure = true"
        home = self.directory / "homes" / "user"
        home.mkdir(parents=True)
        (home / "config.toml").write_text(
            f'[superlink.{LINK}]\naddress = "{self.address}"\n{trust}\n'
        )

    def __enter__(self) -> "Federation":
        try:
            self.start_superlink()
            for number in range(self.nodes):
                self.start_node(number)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_superlink(self) -> None:
        """Start the SuperLink, and wait until it listens. Its database outlives the process."""
        host, port = self.address.split(":")
        options = ["--host", host, "--port", port, "--database", f"{self.directory}/superlink.db"]
        options += ["--disable-runtime-dependency-installation"]
        if self.certificate:
            key = self.certificate.with_suffix(".key")
            options += ["--ssl-ca-certfile", str(self.certificate)]
            options += ["--ssl-certfile", str(self.certificate), "--ssl-keyfile", str(key)]
            options += ["--enable-supernode-auth"]
        else:
            options += ["--insecure"]
        process = self.start("superlink", "flower-superlink", *options)
        for _ in range(600):
            with suppress(OSError):
                return socket.create_connection((host, int(port)), timeout=1).close()
            if process.poll() is not None:
                break
            time.sleep(0.1)
        raise FlowerFailedError(f"the SuperLink did not start:\n{self.log('superlink')}")

    def start_node(self, number: int) -> None:
        """Start the SuperNode with this partition of the data; register its key first."""
        name = f"node-{number}"
        key = self.directory / "keys" / name
        if self.certificate and not key.exists():
            self.flwr("supernode", "register", str(make_key(key).with_suffix(".pub")), LINK)
        self.start_supernode(name, number, key if self.certificate else None, self.certificate)

    def start_supernode(
        self, name: str, number: int, key: Path | None, certificate: Path | None
    ) -> None:
        """Start a SuperNode with this key that trusts this certificate."""
        options = ["--superlink", self.address, "--host", "127.0.0.1", "--port", str(free_port())]
        options += ["--node-config", f"partition-id={number} num-partitions={self.nodes}"]
        options += ["--root-certificates", str(certificate)] if certificate else ["--insecure"]
        options += ["--auth-supernode-private-key", str(key)] if key else []
        self.start(name, "flower-supernode", *options)

    def run(self, config: Mapping[str, Any], within: float = 600.0) -> str:
        """Run the app with these values in its run configuration; return what it printed."""
        return self.wait(self.submit(config), within)

    def submit(self, config: Mapping[str, Any]) -> str:
        """Start a run, and return its number."""
        pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        started = self.flwr("run", str(self.app), LINK, "--run-config", pairs, "--format", "json")
        return str(_read_json(started)["run-id"])

    def wait(self, run: str, within: float = 600.0) -> str:
        """Wait until a run is finished, and return what it printed."""
        end, status, printed = time.monotonic() + within, {"status": ""}, ""
        # The stream of a run that takes more than some ten minutes may end before the run.
        while not status["status"].startswith("finished") and time.monotonic() < end:
            printed = self.flwr("log", run, LINK, "--stream", within=end - time.monotonic())
            status = self.status(run)
        if status["status"] != "finished:completed":
            raise FlowerFailedError(f"run {run} is {status['status']}: {status}\n{printed}")
        return printed

    def status(self, run: str) -> dict[str, Any]:
        """Return what the SuperLink knows about a run: its status, times and bytes."""
        listed = _read_json(self.flwr("list", "--run-id", run, LINK, "--format", "json"))
        return dict(listed["runs"][0])

    def flwr(self, *words: str, within: float = 120.0) -> str:
        """Run the command `flwr`, and return what it printed."""
        done = subprocess.run(
            [COMMANDS / "flwr", *words],
            env=self.environment_of("user"),
            capture_output=True,
            text=True,
            timeout=within,
        )
        if done.returncode:
            raise FlowerFailedError(f"flwr {' '.join(words)}\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(self, name: str, command: str, *options: str) -> subprocess.Popen[bytes]:
        """Start a process in its own session: Ctrl-C reaches only this script, which stops it."""
        path = self.directory / "logs" / f"{name}.log"
        path.parent.mkdir(exist_ok=True)
        with path.open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [COMMANDS / command, *options],
                env=self.environment_of(name),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self.processes[name]

    def stop(self) -> None:
        """Stop all processes, and their child processes, which may still write files."""
        children = []
        for process in self.processes.values():
            with suppress(psutil.NoSuchProcess):
                children += psutil.Process(process.pid).children(recursive=True)
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, 10)
        self.processes.clear()

    def log(self, name: str) -> str:
        """Return what a process has printed."""
        return (self.directory / "logs" / f"{name}.log").read_text(errors="replace")

    def environment_of(self, name: str) -> dict[str, str]:
        """Return the environment of a process. Its files are separate, as on another machine."""
        variables = {
            "PATH": f"{COMMANDS}{os.pathsep}{os.environ.get('PATH', '')}",
            "FLWR_HOME": str(self.directory / "homes" / name),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",  # seconds; Flower waits for 1
            "FEDDA_COMPILE_CACHE": str(self.directory / "compiled"),
            "NO_PROXY": "127.0.0.1,localhost",
            "PYTHONUNBUFFERED": "1",
        }
        return os.environ | variables | self.environment


def _read_json(printed: str) -> Any:
    answer = json.loads(printed[printed.index("{") :])
    if not answer["success"]:  # the exit status does not say so
        raise FlowerFailedError(printed)
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description="Run this app in a federation on this machine.")
    parser.add_argument("--nodes", type=int, default=3, help="number of SuperNodes")
    parser.add_argument("config", nargs="*", metavar="KEY=VALUE", help="of the run configuration")
    given = parser.parse_args()
    known = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    config: dict[str, Any] = {"cohort": given.nodes, "nodes": given.nodes}
    for pair in given.config:
        key, equals, value = pair.partition("=")
        if not equals or key not in known:
            parser.error(f"settings are KEY=VALUE with a key of {', '.join(known)}; got {pair!r}.")
        config[key] = value
        with suppress(ValueError):  # a number
            config[key] = json.loads(value)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # which stops the federation, too
    with (
        tempfile.TemporaryDirectory(prefix="federation-") as directory,
        Federation(Path(directory), nodes=given.nodes) as federation,
    ):
        print(f"{given.nodes} SuperNodes, and a SuperLink at {federation.address}", flush=True)
        try:
            print(federation.run(config))
        except FlowerFailedError as error:
            raise SystemExit(f"The federation failed. {error}") from error


if __name__ == "__main__":
    main()
