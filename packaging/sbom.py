"""Writes the software bill of materials of each container image, in CycloneDX, from the lock that the image installs.

python packaging/sbom.py FOLDER
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;\\]+)")
HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})")


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python packaging/sbom.py FOLDER", file=sys.stderr)
        return 2
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    for lock in sorted(FOLDER.glob("requirements-*.lock")):
        name = lock.stem.removeprefix("requirements-")
        path = target / f"sbom-{name}.cdx.json"
        path.write_text(json.dumps(bill(name, lock.read_text(encoding="utf-8")), indent=1) + "\n", encoding="utf-8")
        print(path)
    return 0


def bill(name: str, lock: str) -> dict[str, Any]:
    """The document for the image that installs `lock`. The same lock gives the same document."""
    version = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "application", "name": f"cortex-{name}", "version": version}},
        "components": components(lock),
    }


def components(lock: str) -> list[dict[str, Any]]:
    """The packages of a lock, each with the digests of the files that may be installed."""
    found: list[dict[str, Any]] = []
    for line in lock.splitlines():
        if pin := PIN.match(line):
            package, version = pin[1].lower().replace("_", "-"), pin[2]
            purl = f"pkg:pypi/{package}@{version}"
            found.append({"type": "library", "name": package, "version": version, "purl": purl, "hashes": []})
        for digest in HASH.findall(line):
            found[-1]["hashes"].append({"alg": "SHA-256", "content": digest})
    return found


if __name__ == "__main__":
    sys.exit(main())
