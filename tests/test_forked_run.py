"""Tests in forked processes give the reports that one process gives, and a process that dies fails its tests."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests.forked_run import ForkedRun

def pytest_configure(config):
    config.pluginmanager.register(ForkedRun(2, lambda nodeid: nodeid.partition("::")[0]))
"""


def run(folder: Path, *options: str, **files: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    paths = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, str(folder)]
    return subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment, check=False, timeout=120
    )


def test_reports_outcomes_output_and_warnings_of_all_processes(tmp_path: Path) -> None:
    done = run(
        tmp_path,
        "-rs",
        one="""
import os, pytest, warnings
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
    assert "1 failed, 3 passed, 1 skipped, 1 warning, 1 error" in done.stdout
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


def test_failure_after_the_last_test_is_reported(tmp_path: Path) -> None:
    fails = """
import pytest
@pytest.fixture(scope="session")
def shared():
    yield
    raise OSError("cannot be torn down")
def test_passes(shared): pass
"""
    done = run(tmp_path, fails=fails)
    assert "1 failed, 1 passed" in done.stdout, done.stdout
    assert "was the last: its process ended with exit code 1" in done.stdout
    assert "cannot be torn down" in done.stderr


def test_first_failure_stops_the_run_and_what_was_set_up_is_torn_down(tmp_path: Path) -> None:
    waits = """
import pathlib, pytest, time
@pytest.fixture
def lasting():
    pathlib.Path("set_up").touch()
    yield
    pathlib.Path("torn_down").touch()
def test_waits(lasting): time.sleep(600)
"""
    fails = """
import pathlib, time
def test_fails():
    while not pathlib.Path("set_up").exists():
        time.sleep(0.01)
    raise AssertionError
"""
    done = run(tmp_path, "-x", waits=waits, fails=fails)
    assert "stopping after 1 failures" in done.stdout, done.stdout
    assert (tmp_path / "torn_down").exists()
