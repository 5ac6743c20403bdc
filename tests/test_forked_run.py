"""Tests in forked processes give the reports that one process gives, and a process that dies fails its tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import WITH_ENGINE_WORKERS
from .waiting import WAIT_S

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests.forked_run import ForkedRun

def pytest_configure(config):
    config.pluginmanager.register(ForkedRun(2, lambda nodeid: nodeid.partition("::")[0], owners=["test_owner.py"]))
"""


def start(folder: Path, *options: str, **files: str) -> subprocess.Popen[str]:
    """A run of these files in a session of its own, as in a terminal."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=environment,
        start_new_session=True,
        # A suite that runs in the background ignores Ctrl-C, and would hand that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def end(started: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    try:
        stdout, stderr = started.communicate(timeout=WAIT_S)
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(started.args, started.returncode, stdout, stderr)


def run(folder: Path, *options: str, **files: str) -> subprocess.CompletedProcess[str]:
    return end(start(folder, *options, **files))


def test_reports_outcomes_output_and_warnings_of_all_processes(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "-rs",
        one="""
import os, pytest, warnings
warnings.warn("imported once", UserWarning)
def test_prints_and_fails(): print("printed by one"); assert 1 == 2
def test_is_skipped(): pytest.skip("for a reason")
def test_warns(): warnings.warn("something is old", DeprecationWarning)
""",
        two="""
import os, pytest
@pytest.fixture(scope="session")
def shared():
    yield os.getpid()
    open("torn_down", "a").write(f"{os.getpid()}\\n")
def test_first(shared): assert shared == os.getpid()
def test_second(shared): assert shared == os.getpid()
@pytest.fixture
def broken(): raise OSError("cannot be set up")
def test_errs(broken): pass
""",
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "1 failed, 3 passed, 1 skipped, 2 warnings, 1 error" in done.stdout
    for text in ("assert 1 == 2", "printed by one", "for a reason", "DeprecationWarning: something is old", "OSError"):
        assert text in done.stdout
    assert len((tmp_path / "torn_down").read_text().split()) == 1


def test_process_that_dies_fails_the_tests_that_it_had_and_no_others(tmp_path: Path) -> None:
    dies = "import os\ndef test_before(): pass\ndef test_dies(): os._exit(7)\ndef test_after(): pass\n"
    done = run(tmp_path, dies=dies, lives="def test_lives(): pass\n")
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "2 failed, 2 passed" in done.stdout, done.stdout
    assert "was running: its process ended with exit code 7" in done.stdout
    assert "did not run: its process ended" in done.stdout


def test_test_over_its_time_limit_fails_and_the_next_one_runs(tmp_path: Path) -> None:
    slow = "import time\ndef test_hangs(): time.sleep(3600)\ndef test_next(): pass\n"
    done = run(tmp_path, "-p", "pytest_timeout", "--timeout", "1", slow=slow)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "Timeout" in done.stdout


def test_files_whose_tests_share_workers_exist() -> None:
    assert [file for file in WITH_ENGINE_WORKERS if not (ROOT / file).is_file()] == []
