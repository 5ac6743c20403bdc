"""Tests in forked processes give the reports that one process gives, and a process that dies fails its tests."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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


def press_ctrl_c(started: subprocess.Popen[str], once_there: Path) -> None:
    """Signal every process, as a terminal does."""
    wait_for(once_there, started)
    os.killpg(started.pid, signal.SIGINT)


def wait_for(file: Path, started: subprocess.Popen[str]) -> None:
    while not file.exists():
        assert started.poll() is None
        time.sleep(0.01)


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


def test_what_belongs_to_the_session_is_torn_down_after_a_group_that_owns_it(tmp_path: Path) -> None:
    owner = """
import pathlib, pytest
@pytest.fixture(scope="session")
def owned():
    yield
    pathlib.Path("torn_down").touch()
def test_first(owned): pass
def test_second(owned): assert not pathlib.Path("torn_down").exists()
"""
    same_process = """
import pathlib
def test_sees_it_torn_down():
    pathlib.Path("ran").touch()
    assert pathlib.Path("torn_down").exists()
"""
    waits = """
import pathlib, time
def test_waits():
    while not pathlib.Path("ran").exists():
        time.sleep(0.01)
"""
    done = run(tmp_path, owner=owner, same_process=same_process, waits=waits)
    assert "4 passed" in done.stdout, done.stdout


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
    yield
    pathlib.Path("torn_down").touch()
def test_waits(lasting):
    pathlib.Path("running").touch()
    time.sleep(3600)
"""
    fails = """
import pathlib, time
def test_fails():
    while not pathlib.Path("running").exists():
        time.sleep(0.01)
    raise AssertionError
"""
    done = run(tmp_path, "-x", waits=waits, fails=fails)
    assert "stopping after 1 failures" in done.stdout, done.stdout
    assert (tmp_path / "torn_down").exists()


def test_ctrl_c_names_the_running_test_and_lets_it_tear_down(tmp_path: Path) -> None:
    waits = """
import pathlib, pytest, time
@pytest.fixture(scope="session")
def lasting():
    yield
    time.sleep(2)
    pathlib.Path("torn_down").touch()
def test_waits(lasting):
    pathlib.Path("running").touch()
    time.sleep(3600)
"""
    started = start(tmp_path, waits=waits)
    press_ctrl_c(started, tmp_path / "running")
    done = end(started)
    assert (tmp_path / "torn_down").exists(), done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "KeyboardInterrupt: while running test_waits.py::test_waits" in done.stdout, done.stdout


def test_ctrl_c_while_the_end_of_a_process_is_noted_lets_the_others_tear_down(tmp_path: Path) -> None:
    waits = """
import os, pathlib, pytest, time
import tests.forked_run

def report_end(process):
    while not pathlib.Path("running").exists():
        time.sleep(0.01)
    os.waitpid(process._process.pid, 0)  # as if the interrupt came between the wait and the note of its result
    raise KeyboardInterrupt

tests.forked_run._Process.report_end = report_end

@pytest.fixture
def lasting():
    yield
    time.sleep(0.5)
    pathlib.Path("torn_down").touch()
def test_waits(lasting):
    pathlib.Path("running").touch()
    time.sleep(3600)
"""
    done = run(tmp_path, waits=waits)
    assert (tmp_path / "torn_down").exists(), done.stdout + done.stderr
    assert done.returncode == pytest.ExitCode.INTERRUPTED


def test_test_that_misses_the_interrupt_is_interrupted_again(tmp_path: Path) -> None:
    waits = """
import pathlib, signal, time
def test_waits():
    interrupt = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, lambda *_: signal.signal(signal.SIGINT, interrupt))  # the first one is lost
    pathlib.Path("running").touch()
    time.sleep(3600)
"""
    started = start(tmp_path, waits=waits)
    wait_for(tmp_path / "running", started)
    os.kill(started.pid, signal.SIGINT)
    assert end(started).returncode == pytest.ExitCode.INTERRUPTED


def test_second_ctrl_c_ends_a_teardown(tmp_path: Path) -> None:
    waits = """
import pathlib, pytest, time
@pytest.fixture
def lasting():
    yield
    pathlib.Path("tearing_down").touch()
    time.sleep(3600)
def test_waits(lasting):
    pathlib.Path("running").touch()
    time.sleep(3600)
"""
    started = start(tmp_path, waits=waits)
    wait_for(tmp_path / "running", started)
    os.kill(started.pid, signal.SIGINT)  # the process that collects: once a test is interrupted, it has handled that
    press_ctrl_c(started, tmp_path / "tearing_down")
    assert end(started).returncode == pytest.ExitCode.INTERRUPTED


def test_stopped_run_ends_when_a_test_swallows_the_interrupt(tmp_path: Path) -> None:
    swallows = """
import pathlib, time
def test_swallows():
    pathlib.Path("running").touch()
    try:
        time.sleep(3600)
    except BaseException:
        pass
"""
    fails = """
import pathlib, time
def test_fails():
    while not pathlib.Path("running").exists():
        time.sleep(0.01)
    raise AssertionError
"""
    done = run(tmp_path, "-x", swallows=swallows, fails=fails)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "stopping after 1 failures" in done.stdout, done.stdout


def test_process_that_does_not_end_is_killed_and_reported(tmp_path: Path) -> None:
    hangs = """
import threading, time
import tests.forked_run
tests.forked_run.END_LIMIT_S = 1
def test_leaves_a_thread(): threading.Thread(target=time.sleep, args=(3600,)).start()
"""
    done = run(tmp_path, hangs=hangs)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    assert "was the last: its process did not end within 1 s" in done.stdout, done.stdout


def test_processes_share_the_folder_of_the_run(tmp_path: Path) -> None:
    writes = "def test_writes(tmp_path): (tmp_path / 'file').touch()\n"
    done = run(tmp_path, one=writes, two=writes)
    assert done.returncode == pytest.ExitCode.OK, done.stdout
    files = [path.relative_to(tmp_path).parts for path in tmp_path.rglob("file")]
    assert {parts[1] for parts in files} == {"pytest-0"}
    assert not list(tmp_path.rglob(".lock")), "pytest keeps locked folders for days"


def test_files_whose_tests_share_workers_exist() -> None:
    assert [file for file in WITH_ENGINE_WORKERS if not (ROOT / file).is_file()] == []
