"""Writes `requirements-*.lock`: everything that the container images install, with versions and hashes.

The versions are those of this environment, which the tests run with. Needs the program `uv`.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent
HEADER = "# Written by `make locks`.\n"
NOT_OURS = ("cortex", "cortex-fleet", "triton")
"""torch names the version of triton that it needs; this environment has a later one for its interpreter."""
CUDA = ("torch", "triton", "nvidia-", "cuda-")
"""What the image for CPUs does not install from the lock. NVML stays: it finds out that there is no GPU."""


def main() -> int:
    if shutil.which("uv") is None:
        print("make locks needs uv: https://docs.astral.sh/uv", file=sys.stderr)
        return 1
    gateway = compiled("pyproject.toml", "--extra", "oidc", "--extra", "postgres", "--extra", "telemetry")
    neuron = compiled("pyproject.toml", "--extra", "neuron", "--extra", "telemetry")
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    with tempfile.NamedTemporaryFile("w", suffix=".in") as requirements:
        requirements.write("\n".join(build))
        requirements.flush()
        tools = compiled(requirements.name)
    for name, text in {
        "build": tools,
        "gateway": gateway,
        "neuron": neuron,
        "neuron-cpu": without_cuda(neuron),
    }.items():
        (FOLDER / f"requirements-{name}.lock").write_text(HEADER + text)
    return 0


def compiled(source: str, *options: str) -> str:
    """The lock of the requirements in `source`."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as constraints:
        constraints.write("\n".join(tested_versions()))
        constraints.flush()
        command = ["uv", "pip", "compile", source, "--universal", "--python-version", "3.11", "--generate-hashes"]
        command += ["--no-annotate", "--no-header", "--quiet", "--constraints", constraints.name, *options]
        return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def tested_versions() -> list[str]:
    found = importlib.metadata.distributions()
    versions = {each.metadata["Name"].lower(): each.version.partition("+")[0] for each in found}
    return [f"{name}=={version}" for name, version in sorted(versions.items()) if name not in NOT_OURS]


def without_cuda(lock: str) -> str:
    """`lock` without torch and the packages that only its GPU builds need."""
    kept, is_kept = [], True
    for line in lock.splitlines(keepends=True):
        if not line.startswith((" ", "#")):
            is_kept = line.startswith("nvidia-ml-py") or not line.startswith(CUDA)
        if is_kept:
            kept.append(line)
    return "".join(kept)


if __name__ == "__main__":
    sys.exit(main())
