"""A virtual environment for each framework, made from the package index. Standard library only."""

import subprocess
import sys
from pathlib import Path

TORCH = ["torch==2.13.0", "numpy==2.4.6"]
REQUIREMENTS = {
    "torch": TORCH,
    "flower": ["flwr[simulation]==1.41.0", "ray==2.55.1", *TORCH],
    "pfl": ["pfl==0.6.0", *TORCH],
    "fedlab": ["fedlab==1.3.0", *TORCH],
    "fluke": ["fluke-fl==0.8.1", *TORCH],
    "nvflare": ["nvflare==2.9.0", *TORCH],
    "fedjax": ["fedjax==0.0.17", "jax==0.10.2", "dm-haiku==0.0.17", "numpy==2.4.6"],
    # The last JAX that has everything FedJAX uses.
    "fedjax-2024": [
        "fedjax==0.0.17",
        "jax==0.4.26",
        "jaxlib==0.4.26",
        "dm-haiku==0.0.12",
        "optax==0.2.2",
        "scipy==1.12.0",
        "numpy==1.26.4",
    ],
}


class InstallError(Exception):
    """Why an environment could not be made, in one line."""


def interpreter(name: str, work: Path) -> str:
    """The interpreter of an environment, which is made unless it is there as it should be."""
    home = work / "environments" / name
    python, ready = home / "bin" / "python", home / "ready"
    wanted = "\n".join(REQUIREMENTS[name])
    if not ready.exists() or ready.read_text() != wanted:
        print(f"installing {name}", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS[name]]
        result = subprocess.run(install, capture_output=True, text=True)
        if result.returncode:
            errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
            raise InstallError((errors or result.stderr.splitlines() or ["pip failed"])[-1])
        ready.write_text(wanted)
    return str(python)
