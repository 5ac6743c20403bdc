"""Real child processes, and everything that ends them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from cortex.cli.up.command import Child, ChildDied, ProcessSupervisor, fault_of

from ...processes import wait_end
from ...waiting import WAIT_S, wait_until

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(999)"
)
PLAIN = "import time; print('up', flush=True); time.sleep(999)"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def wait_for_text(path: Path, text: str) -> None:
    wait_until(lambda: path.exists() and text in path.read_text(), lambda: f"{path} never contained {text!r}")


def test_leaving_the_block_terminates_every_child(tmp_path: Path) -> None:
    with ProcessSupervisor(grace_s=WAIT_S) as supervisor:
        children = [supervisor.start(name, python(PLAIN), tmp_path / name, os.environ) for name in ("a", "b")]
        assert supervisor.wait(0.05)
    assert all(child.process.returncode == -signal.SIGTERM for child in children)


def test_kills_a_child_that_ignores_sigterm_after_the_grace_period(tmp_path: Path) -> None:
    with ProcessSupervisor(grace_s=0.3) as supervisor:
        child = supervisor.start("a", python(STUBBORN), tmp_path / "a", os.environ)
        wait_for_text(tmp_path / "a", "up")
    assert child.process.returncode == -signal.SIGKILL


def test_kills_grandchildren_in_the_process_group(tmp_path: Path) -> None:
    code = f"""
        import subprocess, sys
        inner = subprocess.Popen([sys.executable, "-c", {STUBBORN!r}])
        print(inner.pid, "started", flush=True)
        inner.wait()
    """
    with ProcessSupervisor(grace_s=0.3) as supervisor:
        supervisor.start("a", python(textwrap.dedent(code)), tmp_path / "a", os.environ)
        wait_for_text(tmp_path / "a", "started")
        wait_for_text(tmp_path / "a", "up")
        grandchild = int(next(word for word in (tmp_path / "a").read_text().split() if word.isdigit()))
    wait_end(grandchild)


def test_reports_a_child_that_exited_with_its_last_log_line(tmp_path: Path) -> None:
    with ProcessSupervisor(grace_s=WAIT_S) as supervisor:
        other = supervisor.start("other", python(PLAIN), tmp_path / "other", os.environ)
        supervisor.start("broken", python("import sys; print('port taken'); sys.exit(3)"), tmp_path / "b", os.environ)
        with pytest.raises(ChildDied) as death:
            supervisor.wait(WAIT_S)
    assert death.value.child.name == "broken"
    assert death.value.child.process.returncode == 3
    assert death.value.child.last_lines() == ["port taken"]
    assert other.process.returncode is not None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_only_requests_a_stop_and_handlers_are_restored(tmp_path: Path, number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with ProcessSupervisor(grace_s=WAIT_S) as supervisor:
        supervisor.start("a", python(PLAIN), tmp_path / "a", os.environ)
        signal.raise_signal(number)
        assert supervisor.wait(WAIT_S) is False
    assert signal.getsignal(number) is before


def test_second_signal_skips_the_grace_period(tmp_path: Path) -> None:
    started = time.monotonic()
    with ProcessSupervisor(grace_s=WAIT_S) as supervisor:
        supervisor.start("a", python(STUBBORN), tmp_path / "a", os.environ)
        wait_for_text(tmp_path / "a", "up")
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert time.monotonic() - started < WAIT_S


def test_children_end_when_the_supervisor_is_killed(tmp_path: Path) -> None:
    code = f"""
        import os, sys
        from pathlib import Path
        from cortex.cli.up.command import ProcessSupervisor
        with ProcessSupervisor(grace_s={WAIT_S}) as supervisor:
            child = supervisor.start("a", [sys.executable, "-c", {PLAIN!r}], Path({str(tmp_path / "a")!r}), os.environ)
            print(child.process.pid, flush=True)
            supervisor.wait({WAIT_S})
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen(python(textwrap.dedent(code)), stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    child_pid = int(parent.stdout.readline())
    wait_for_text(tmp_path / "a", "up")
    parent.kill()
    parent.wait()
    parent.stdout.close()
    wait_end(child_pid)


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        ("exit 3", "the neuron ended unexpectedly: no such model; its log is "),
        ("kill -KILL $$", "the neuron ended unexpectedly: killed by SIGKILL (by the system, if it ran out of memory: "),
        ("kill -ABRT $$", "the neuron ended unexpectedly: killed by SIGABRT; its log is "),
    ],
)
def test_last_line_of_the_log_is_the_reason_unless_a_signal_killed_the_program(
    tmp_path: Path, ends: str, reason: str
) -> None:
    log = tmp_path / "log"
    log.write_text("served a request\nneuron: no such model\n")
    process = subprocess.Popen(["/bin/sh", "-c", ends])
    process.wait(WAIT_S)
    assert str(fault_of(ChildDied(Child("neuron", process, log)))).startswith(reason)
