"""What is installed: the version, and the commit that it was built from where that is known."""

from __future__ import annotations

import functools
import json
import platform
from pathlib import Path

from cortex import __version__

DISTRIBUTION = "cortex-fleet"
COMMIT_FILE = Path(__file__).parent.with_name("COMMIT")
"""Written by builds that know their commit, such as the container images."""


@functools.cache
def build_information() -> dict[str, str | None]:
    """The body of `/version`. `commit` is None for an installation that does not know it."""
    return {
        "version": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "platform": f"{platform.system().lower()}-{platform.machine()}",
    }


def version_of(package: str) -> str | None:
    """The version of another installed package."""
    import importlib.metadata  # half a megabyte with its imports, for a rare request

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    import importlib.metadata  # as above

    if COMMIT_FILE.exists():
        return COMMIT_FILE.read_text(encoding="ascii").strip() or None
    try:
        origin = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    # pip records the commit of `pip install git+https://…`.
    commit = json.loads(origin or "{}").get("vcs_info", {}).get("commit_id")
    return commit if isinstance(commit, str) else None
