"""Builds what a release consists of: wheel, sdist, bills of materials, provenance and checksums.

python packaging/release.py FOLDER

Everything is built from the commit that is checked out, never from files that git does not know. It is built twice,
and the release fails if the two differ by a byte. `make release` also installs and tries the results.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import io
import os
import platform
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROVENANCE = """# Provenance of cortex-fleet {version}

| | |
|---|---|
| commit | `{commit}` |
| commit date | {date} |
| built with | Python {python}, setuptools {setuptools}, build {build}, on {platform} |
| command | `make release` |
| built twice with equal bytes | yes |

The files were built from an export of the commit (`git archive`) with `SOURCE_DATE_EPOCH={epoch}`. Only
`src/cortex/COMMIT`, which `/version` reports, was added. To reproduce them, check out the commit and run
`make release`: with the same setuptools (`packaging/requirements-build.lock`), wheel and sdist have the same digests.

`sbom-*.cdx.json` list what the container images install, with digests, from `packaging/requirements-*.lock`. The
wheel contains no third-party code other than the libraries of the page in `cortex/gateway/page/files/vendor`, which
records their versions and licences.

| file | SHA-256 |
|---|---|
{digests}
"""


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python packaging/release.py FOLDER", file=sys.stderr)
        return 2
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if reason := obstacle(version):
        print(f"release: {reason}", file=sys.stderr)
        return 1
    target = Path(sys.argv[1]).resolve()
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        if old.is_file():
            old.unlink()
    commit, epoch = git("rev-parse", "HEAD"), git("log", "-1", "--format=%ct")
    first, second = built(commit, epoch), built(commit, epoch)
    if first != second:
        print(f"release: two builds differ: {sorted(name for name in first if first[name] != second.get(name))}")
        return 1
    for name, content in first.items():
        (target / name).write_bytes(content)
    subprocess.run([sys.executable, ROOT / "packaging" / "sbom.py", target], check=True, stdout=subprocess.DEVNULL)
    (target / "PROVENANCE.md").write_text(provenance(version, commit, epoch, first), encoding="utf-8")
    files = sorted(each for each in target.iterdir() if each.is_file())
    sums = "".join(f"{digest(each.read_bytes())}  {each.name}\n" for each in files)
    (target / "SHA256SUMS").write_text(sums, encoding="ascii")
    print(sums, end="")
    return 0


def obstacle(version: str) -> str | None:
    """Why this commit cannot be released as `version`."""
    if git("status", "--porcelain"):
        return "there are changes that are not committed"
    namespace: dict[str, str] = {}
    exec((ROOT / "src" / "cortex" / "__init__.py").read_text(encoding="utf-8"), namespace)
    if namespace["__version__"] != version:
        return f"src/cortex/__init__.py has version {namespace['__version__']}, pyproject.toml {version}"
    if f"## [{version}]" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        return f"CHANGELOG.md has no section for {version}"
    tag = f"v{version}"
    if git("tag", "--list", tag) and git("rev-list", "-1", tag) != git("rev-parse", "HEAD"):
        return f"{tag} is the tag of another commit: raise the version"
    return None


def built(commit: str, epoch: str) -> dict[str, bytes]:
    """The sdist, and the wheel that is built from it, by file name."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "source"), Path(folder, "out")
        source.mkdir()
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as exported:
            exported.extractall(source, filter="data")
        (source / "src" / "cortex" / "COMMIT").write_text(commit + "\n", encoding="ascii")
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": epoch}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SystemExit(done.stdout + done.stderr)
        return {
            each.name: repacked(each.read_bytes(), int(epoch)) if each.name.endswith(".tar.gz") else each.read_bytes()
            for each in sorted(out.iterdir())
        }


def repacked(sdist: bytes, epoch: int) -> bytes:
    """The same files in a fixed order, without the time and the user of the build."""
    raw = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(sdist)) as read,
        tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT) as written,
    ):
        for member in sorted(read.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            written.addfile(member, read.extractfile(member) if member.isfile() else None)
    return gzip.compress(raw.getvalue(), mtime=epoch)


def provenance(version: str, commit: str, epoch: str, files: dict[str, bytes]) -> str:
    return PROVENANCE.format(
        version=version,
        commit=commit,
        epoch=epoch,
        date=datetime.fromtimestamp(int(epoch), UTC).isoformat(),
        python=platform.python_version(),
        setuptools=importlib.metadata.version("setuptools"),
        build=importlib.metadata.version("build"),
        platform=platform.platform(),
        digests="\n".join(f"| `{name}` | `{digest(content)}` |" for name, content in files.items()),
    )


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
