"""The bills of materials name every package of the locks, with its digests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PACKAGING = Path(__file__).parents[2] / "packaging"


def test_every_locked_package_is_listed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(PACKAGING / "sbom.py"), str(tmp_path)], check=True, capture_output=True)
    locks = sorted(PACKAGING.glob("requirements-*.lock"))
    assert len(list(tmp_path.iterdir())) == len(locks) > 0
    for lock in locks:
        text = lock.read_text(encoding="utf-8")
        name = lock.stem.removeprefix("requirements-")
        document = json.loads((tmp_path / f"sbom-{name}.cdx.json").read_text(encoding="utf-8"))
        assert (document["bomFormat"], document["specVersion"]) == ("CycloneDX", "1.5")
        components = document["components"]
        assert len(components) == sum("==" in line for line in text.splitlines())
        assert sum(len(each["hashes"]) for each in components) == text.count("--hash=sha256:")
        assert all(each["purl"] == f"pkg:pypi/{each['name']}@{each['version']}" for each in components)
