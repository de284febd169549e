"""A real Flower federation on one machine: SuperLink and SuperNodes, with TLS and node keys.

    python federation.py                                   three nodes, one run, then all is stopped
    python federation.py --nodes 5 algorithm=fedda-adam rounds=5

Everything is thrown away at the end: certificates, keys, Flower's own folders. What a run writes is
in its `out`. As a context manager it serves tests and benchmarks:

    with Federation(directory) as federation:
        federation.run({"algorithm": "fedda-adam", "rounds": 5})
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
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

APP = Path(__file__).parent
COMMANDS = Path(sys.executable).parent  # Flower's, of the environment that runs this
PATIENCE = 60.0  # seconds for a SuperLink to listen, and for a process to end by itself
NAME = "loopback"  # what Flower's configuration calls this SuperLink


class FlowerFailedError(RuntimeError):
    """A command of Flower, or a run, that did not succeed: with what it said."""


class Certificates(NamedTuple):
    """Files of a SuperLink: whom to trust, who it is, and its secret."""

    authority: Path
    server: Path
    key: Path


def make_certificates(directory: Path) -> Certificates:
    """An authority of its own, and a certificate for this machine's loopback addresses."""
    directory.mkdir(parents=True, exist_ok=True)
    root, leaf = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    issuer, owner = (_named(name) for name in ("throw-away authority", "localhost"))
    anchor = (
        _certificate(issuer, issuer, root)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_signs_only(), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(root.public_key()), critical=False)
        .sign(root, hashes.SHA384())
    )
    addresses = [ipaddress.ip_address("127.0.0.1"), ipaddress.ip_address("::1")]
    names = [x509.DNSName("localhost"), *map(x509.IPAddress, addresses)]
    certificate = (
        _certificate(issuer, owner, leaf)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(root.public_key()), critical=False
        )
        .sign(root, hashes.SHA384())
    )
    made = Certificates(*(directory / name for name in ("ca.pem", "server.pem", "server.key")))
    made.authority.write_bytes(anchor.public_bytes(serialization.Encoding.PEM))
    made.server.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_secret(made.key, leaf, serialization.PrivateFormat.TraditionalOpenSSL)
    return made


def make_key(path: Path) -> Path:
    """A node's private key in OpenSSH's format; the public one lies beside it, with `.pub`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    _write_secret(path, key, serialization.PrivateFormat.OpenSSH)
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    path.with_suffix(".pub").write_bytes(public)
    return path


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _certificate(
    issuer: x509.Name, owner: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .issuer_name(issuer)
        .subject_name(owner)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=1))
    )


def _signs_only() -> x509.KeyUsage:
    return x509.KeyUsage(
        key_cert_sign=True,
        crl_sign=True,
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write_secret(
    path: Path, key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat
) -> None:
    secret = key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(secret)


class Federation:
    """A SuperLink and its SuperNodes, as long as the context lasts.

    `directory` holds certificates, keys, the logs of all processes and Flower's own folders, one
    for each process as if it were a machine. Flower authenticates nodes only under TLS.
    """

    def __init__(
        self,
        directory: Path,
        app: Path = APP,
        nodes: int = 3,
        tls: bool = True,
        authenticated: bool = True,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.directory, self.app, self.nodes = directory.absolute(), app, nodes
        self.authenticated = authenticated and tls
        self.certificates = make_certificates(self.directory / "tls") if tls else None
        self.port = free_port()
        self._environment = dict(environment or {})
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

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

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start_superlink(self) -> None:
        """Starts the SuperLink and waits until it listens. What it knows outlives its process."""
        self._write_configuration()
        words = ["--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--database", str(self.directory / "superlink.db")]
        words += ["--disable-runtime-dependency-installation"]
        if self.certificates:
            words += ["--ssl-ca-certfile", str(self.certificates.authority)]
            words += ["--ssl-certfile", str(self.certificates.server)]
            words += ["--ssl-keyfile", str(self.certificates.key)]
        else:
            words += ["--insecure"]
        words += ["--enable-supernode-auth"] if self.authenticated else []
        process = self._start("superlink", "flower-superlink", words)
        last = time.monotonic() + PATIENCE
        while not _listens(self.port):
            if process.poll() is not None or time.monotonic() > last:
                raise FlowerFailedError(f"the SuperLink did not start:\n{self.log('superlink')}")
            time.sleep(0.05)

    def start_node(self, number: int) -> str:
        """Starts the SuperNode that has the partition of this number; it is registered first."""
        name = f"node-{number}"
        key = self.directory / "keys" / name
        if self.authenticated and not key.exists():
            self.flwr("supernode", "register", str(make_key(key).with_suffix(".pub")), NAME)
        self.start_stranger(name, number, key if self.authenticated else None)
        return name

    def start_stranger(
        self, name: str, number: int, key: Path | None = None, authority: Path | None = None
    ) -> None:
        """Starts a SuperNode of this name, with a key or none, that trusts this authority."""
        words = ["--superlink", self.address, "--host", "127.0.0.1", "--port", str(free_port())]
        words += ["--node-config", f"partition-id={number} num-partitions={self.nodes}"]
        trusted = authority or (self.certificates and self.certificates.authority)
        words += ["--root-certificates", str(trusted)] if trusted else ["--insecure"]
        words += ["--auth-supernode-private-key", str(key)] if key else []
        self._start(name, "flower-supernode", words)

    def kill(self, name: str) -> None:
        """Ends a process as a power cut would, with those that it started."""
        process = self._processes[name]
        started = descendants(process.pid)
        process.kill()
        process.wait()
        _kill(started)

    def kill_node(self, number: int) -> None:
        self.kill(f"node-{number}")

    def kill_serverapp(self) -> None:
        """Kills the process of a run's ServerApp, and of nothing else."""
        found = [
            pid
            for pid, command in descendants(self._processes["superlink"].pid).items()
            if "flwr-serverapp" in command
        ]
        if not found:
            raise FlowerFailedError("there is no ServerApp to kill.")
        _kill(found)

    def ended(self, name: str, within: float = PATIENCE) -> int:
        """The exit status of a process that ends by itself."""
        return self._processes[name].wait(within)

    def log(self, name: str) -> str:
        """What a process has printed so far."""
        return (self.directory / "logs" / f"{name}.log").read_text(errors="replace")

    def run(self, config: Mapping[str, Any] | None = None, within: float = 600.0) -> str:
        """Submits a run and waits until it is finished; gives what its ServerApp printed."""
        return self.wait(self.submit(config or {}), within)

    def submit(self, config: Mapping[str, Any]) -> str:
        """Starts a run with these values in its run configuration; gives its number."""
        pairs = " ".join(f"{key}={json.dumps(value)}" for key, value in config.items())
        words = ["--run-config", pairs] if pairs else []
        return str(self._flwr_json("run", str(self.app), NAME, *words)["run-id"])

    def wait(self, run: str, within: float = 600.0) -> str:
        """What the ServerApp of a run printed, once it is finished; an error if it failed."""
        printed = self.flwr("log", run, NAME, "--stream", within=within)
        status = self.status(run)
        if status["status"] != "finished:completed":
            raise FlowerFailedError(f"run {run} is {status['status']}: {status}\n{printed}")
        return printed

    def status(self, run: str) -> dict[str, Any]:
        """What the SuperLink knows of a run: its status, its times, its bytes."""
        found: dict[str, Any] = self._flwr_json("list", "--run-id", run, NAME)["runs"][0]
        return found

    def flwr(self, *words: str, within: float = 120.0) -> str:
        """What the command `flwr` prints."""
        done = subprocess.run(
            [COMMANDS / "flwr", *words],
            env=self._environment_of("user"),
            capture_output=True,
            text=True,
            timeout=within,
        )
        if done.returncode:
            raise FlowerFailedError(f"flwr {' '.join(words)}\n{done.stdout}{done.stderr}")
        return done.stdout

    def _flwr_json(self, *words: str) -> Any:
        printed = self.flwr(*words, "--format", "json")
        found = json.loads(printed[printed.index("{") :])
        if not found["success"]:  # its exit status does not tell
            raise FlowerFailedError(printed)
        return found

    def stop(self) -> None:
        """Ends every process that was started here, and those that they started."""
        started: dict[int, str] = {}
        for process in self._processes.values():
            started |= descendants(process.pid)
        for process in reversed(self._processes.values()):
            if process.poll() is None:
                process.terminate()
        for process in self._processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        _kill(started)  # most have gone with their parents
        self._processes.clear()

    def _write_configuration(self) -> None:
        secure = f'root-certificates = "{self.certificates.authority}"' if self.certificates else ""
        home = self.directory / "homes" / "user"
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\n'
            f'address = "{self.address}"\n{secure or "insecure = true"}\n'
        )

    def _start(self, name: str, command: str, words: list[str]) -> subprocess.Popen[bytes]:
        path = self.directory / "logs" / f"{name}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as log:
            process = subprocess.Popen(
                [COMMANDS / command, *words],
                env=self._environment_of(name),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for this process, which then stops the others
            )
        self._processes[name] = process
        return process

    def _environment_of(self, name: str) -> dict[str, str]:
        return (
            os.environ
            | {
                "PATH": f"{COMMANDS}{os.pathsep}{os.environ.get('PATH', '')}",
                "FLWR_HOME": str(self.directory / "homes" / name),
                "FLWR_TELEMETRY_ENABLED": "0",
                "FLWR_DISABLE_UPDATE_CHECK": "1",
                "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.25",  # seconds; Flower's own is 1
                "FEDDA_COMPILE_CACHE": str(self.directory / "compiled"),
                "NO_PROXY": "127.0.0.1,localhost",
                "PYTHONUNBUFFERED": "1",
            }
            | self._environment
        )


def free_port() -> int:
    """A port of the loopback address that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


def descendants(pid: int) -> dict[int, str]:
    """The processes that this one started, and those that they did, each with its command."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    table = [line.split(None, 2) for line in listed.splitlines()]
    found: dict[int, str] = {}
    parents = {pid}
    while parents:
        children = {int(row[0]): row[2] for row in table if int(row[1]) in parents and len(row) > 2}
        found |= children
        parents = set(children)
    return found


def _kill(pids: Collection[int]) -> None:
    """Kills processes, and waits until they are gone."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    last = time.monotonic() + 5
    while any(_exists(pid) for pid in pids) and time.monotonic() < last:
        time.sleep(0.01)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def _terminated_like_ctrl_c() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs this app in a federation on this machine.")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("config", nargs="*", metavar="KEY=VALUE", help="of the run configuration")
    given = parser.parse_args()
    known = tomllib.loads((APP / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    for pair in given.config:
        if "=" not in pair:
            parser.error(f"settings are KEY=VALUE, such as rounds=5, got {pair!r}.")
        if pair.split("=", 1)[0] not in known:
            parser.error(f"settings are {', '.join(known)}, got {pair!r}.")
    config = {"cohort": given.nodes, "nodes": given.nodes}
    config |= {key: _value(text) for key, text in (pair.split("=", 1) for pair in given.config)}
    with (
        _terminated_like_ctrl_c(),
        tempfile.TemporaryDirectory(prefix="federation-") as directory,
        Federation(Path(directory), nodes=given.nodes) as federation,
    ):
        print(f"{given.nodes} SuperNodes, and a SuperLink at {federation.address}", flush=True)
        try:
            print(federation.run(config))
        except FlowerFailedError as error:
            raise SystemExit(f"The federation failed. {error}") from error


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()
