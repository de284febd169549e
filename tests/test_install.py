"""The environment of the README's two commands: it must not break when others release something."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "tools"))
import check_environment

ROOT = Path(__file__).parents[1]
PINNED = "etils"  # Orbax asks for it with extras, which older versions of pip do not see as pinned


# ------------------------------------------------------------------------------------- the check


def test_the_environment_of_the_tests_is_complete():
    assert check_environment.problems("fedda[dev,report,flower,privacy]") == []


def test_what_is_missing_is_named_also_where_only_an_extra_asks_for_it(monkeypatch):
    real = check_environment.distribution

    def without_zipp(name: str):
        if name == "zipp":  # only etils[epath] asks for it
            raise check_environment.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(check_environment, "distribution", without_zipp)
    (problem,) = check_environment.problems("fedda[dev]")
    assert problem == "zipp is missing, which etils asks for"


def test_a_version_that_pyproject_refuses_is_named(monkeypatch):
    class Old:
        version, name = "0.7.0", "jax"
        requires = ()

    real = check_environment.distribution
    monkeypatch.setattr(
        check_environment, "distribution", lambda name: Old if name == "jax" else real(name)
    )
    assert "jax>=0.8.0 is 0.7.0 here, which fedda refuses" in check_environment.problems("fedda")


# ---------------------------------------------------------------------------------- installation


def release(folder: Path, version: str) -> None:
    """Puts a release of `PINNED` with extras into a folder that pip looks into."""
    about = f"{PINNED}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {PINNED}\nVersion: {version}\n"
    metadata += "Provides-Extra: epath\nProvides-Extra: epy\n"
    wheel = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(folder / f"{PINNED}-{version}-py3-none-any.whl", "w") as archive:
        archive.writestr(f"{about}/METADATA", metadata)
        archive.writestr(f"{about}/WHEEL", wheel)
        archive.writestr(f"{about}/RECORD", "")


def python_with_pip(folder: Path, version: str) -> Path:
    """A Python whose new environments have this version of pip, or the newest."""
    wanted = f"pip=={version}" if version else "pip"
    script = folder / "python"
    script.write_text(
        f'#!/bin/sh\n{sys.executable} "$@" || exit\n'
        'if [ "$1 $2" = "-m venv" ]; then\n'
        f'    "$3/bin/python" -m pip install --quiet --upgrade {wanted}\nfi\n'
    )
    script.chmod(0o755)
    return script


def clean(folder: Path) -> dict[str, str]:
    """The environment of somebody who has just come: no cache, an empty home."""
    home = folder / "home"
    home.mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return kept | {
        "HOME": str(home),
        "PIP_NO_CACHE_DIR": "1",
        "PIP_FIND_LINKS": str(folder),
        "MAKEFLAGS": "",
    }


@pytest.mark.slow
@pytest.mark.parametrize("version", ["22.3", ""], ids=["pip-22.3", "newest-pip"])
def test_a_newer_release_does_not_break_the_locked_environment(tmp_path: Path, version: str):
    release(tmp_path, "99.0.0")
    venv = tmp_path / "venv"
    made = subprocess.run(
        ["make", f"VENV={venv}", f"PYTHON={python_with_pip(tmp_path, version)}", f"{venv}/ready"],
        cwd=ROOT, env=clean(tmp_path), capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stdout + made.stderr
    asked = "import importlib.metadata as m; print(m.version('pip'), m.version('etils'))"
    words = subprocess.run([venv / "bin/python", "-c", asked], capture_output=True, text=True)
    pip, etils = words.stdout.split()
    assert pip == version or not version
    assert f"{PINNED}=={etils} " in (ROOT / "requirements.lock").read_text()
    shown = subprocess.run([venv / "bin/fedda", "--help"], capture_output=True, text=True)
    assert "compare" in shown.stdout


@pytest.mark.slow
def test_what_pip_says_is_shown_when_it_fails(tmp_path: Path):
    lock = tmp_path / "lock"
    lock.write_text("etils==1.0.0 --hash=sha256:" + "0" * 64 + "\n")
    venv = tmp_path / "venv"
    made = subprocess.run(
        ["make", f"VENV={venv}", f"LOCK={lock}", f"{venv}/ready"],
        cwd=ROOT, env=clean(tmp_path), capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode != 0
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in made.stderr
    assert not (venv / "ready").exists()
