"""The commands against the real programs, as a person and as a script would use them."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, NamedTuple
from unittest.mock import patch

import pytest

from cortex.cli.cortex import main
from cortex.cli.up.demo import SMOLLM2

from ..programs import PYTHONPATH
from ..waiting import WAIT_S, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .conftest import Run

pytestmark = pytest.mark.e2e


def environment(run: Run) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": PYTHONPATH, "CORTEX_URL": run.url, "TERM": "xterm", "COLUMNS": "200"}


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def cortex(run: Run, *arguments: str) -> Ended:
    """Run the command in this process: most of a short command's time goes into its imports."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with (
        patch.dict(os.environ, environment(run)),
        patch.object(sys, "argv", ["cortex", *arguments]),
        patch.object(sys, "stdin", io.StringIO()),
        redirect_stdout(stdout),
        redirect_stderr(stderr),
        pytest.raises(SystemExit) as exited,
    ):
        main()
    return Ended(int(exited.value.code or 0), stdout.getvalue(), stderr.getvalue())


def test_status_shows_the_node_its_device_and_the_ready_model(up: Run) -> None:
    shown = cortex(up, "status")
    assert shown.returncode == 0, shown.stderr
    assert re.search(rf"{re.escape(SMOLLM2.id)}\s+ready", shown.stdout)
    assert "GiB" in shown.stdout
    (node,) = json.loads(cortex(up, "status", "--json").stdout)["nodes"]
    assert node["up"] is True
    assert node["devices"][0]["total_bytes"] > 0


def test_models_lists_the_model_as_ready(up: Run) -> None:
    assert re.search(rf"{re.escape(SMOLLM2.id)} +ready +local .* 8,192 ", cortex(up, "models").stdout)


def test_chat_responds_to_a_prompt_on_the_command_line(up: Run) -> None:
    response = cortex(up, "chat", SMOLLM2.id, "What is the capital of Japan?", "-t", "0", "-n", "16")
    assert "Tokyo" in response.stdout, response.stderr


def test_chat_responds_to_a_prompt_from_a_pipe(up: Run) -> None:
    response = subprocess.run(
        [sys.executable, "-m", "cortex.cli.cortex", "chat", "-t", "0", "-n", "16"],
        input="What is the capital of Japan?",
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        env=environment(up),
    )
    assert "Tokyo" in response.stdout, response.stderr


def test_explain_says_it_is_ready(up: Run) -> None:
    assert "ready" in cortex(up, "explain", SMOLLM2.id).stdout


def test_model_is_pinned_unpinned_unloaded_and_loaded_by_commands_and_by_a_request(up: Run) -> None:
    assert cortex(up, "pin", SMOLLM2.id).returncode == 0
    assert "ready, pinned" in cortex(up, "status").stdout
    rejected = cortex(up, "unload", SMOLLM2.id)
    assert rejected.returncode == 1
    assert "--yes" in rejected.stderr
    assert cortex(up, "unpin", SMOLLM2.id).returncode == 0
    assert "pinned" not in cortex(up, "status").stdout
    assert cortex(up, "unload", SMOLLM2.id).stdout.endswith(f"{SMOLLM2.id} unloaded: local\n")
    assert "no model is in memory" in cortex(up, "ps").stdout
    assert "load" in cortex(up, "load", SMOLLM2.id, "--dry-run").stdout
    loaded = cortex(up, "load", SMOLLM2.id)
    assert loaded.stdout.splitlines()[-1] == f"{SMOLLM2.id} is ready on local: context 8,192 tokens", loaded.stderr
    assert re.search(rf"{re.escape(SMOLLM2.id)}\s+local\s+ready", cortex(up, "ps").stdout)
    assert cortex(up, "pin", SMOLLM2.id).returncode == 0
    assert cortex(up, "unload", SMOLLM2.id, "--yes").returncode == 0
    kinds = [job["kind"] for job in json.loads(cortex(up, "jobs", "--json").stdout)]
    assert kinds[:4] == ["unload", "pin", "load", "unload"]
    response = cortex(up, "chat", SMOLLM2.id, "What is the capital of Japan?", "-t", "0", "-n", "16")
    assert "Tokyo" in response.stdout, "a request must bring the model back by itself: " + response.stderr
    latest = json.loads(cortex(up, "logs", "--json", "-n", "1").stdout)[0]
    assert (latest["model"], latest["status"]) == (SMOLLM2.id, 200)
    assert 0 < latest["completion_tokens"] <= 16


def test_unknown_model_has_its_own_exit_code_and_suggests_the_nearest_name(up: Run) -> None:
    rejected = cortex(up, "load", "smollm2-135m-instrukt")
    assert rejected.returncode == 5
    assert SMOLLM2.id in rejected.stderr
    assert "Traceback" not in rejected.stderr


def test_doctor_finds_the_gateway_and_nothing_to_do(up: Run) -> None:
    checked = cortex(up, "doctor")
    assert checked.returncode == 0, checked.stdout
    assert f"{up.url} responds" in checked.stdout


class Terminal:
    """A person at a terminal: types, presses keys, reads what appears."""

    def __init__(self, run: Run, *arguments: str) -> None:
        self.pid, self.descriptor = pty.fork()
        if self.pid == 0:
            command = [sys.executable, "-m", "cortex.cli.cortex", *arguments]
            # A suite that runs in the background ignores Ctrl-C, and would hand that down.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execve(sys.executable, command, environment(run))
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def wait_for(self, pattern: str) -> None:
        """Read until `pattern` appears in what has not been matched yet."""
        deadline = time.monotonic() + WAIT_S
        while not (match := re.search(pattern, self.seen)):
            assert self._read(deadline - time.monotonic()), f"{pattern!r} did not appear in {self.seen!r}"
        self.seen = self.seen[match.end() :]

    def wait_end(self) -> int:
        """The exit code, once the program has ended by itself."""
        deadline = time.monotonic() + WAIT_S
        while self._read(deadline - time.monotonic()):
            pass

        status = 0

        def has_ended() -> int:
            nonlocal status
            process_id, status = os.waitpid(self.pid, os.WNOHANG)
            return process_id

        wait_until(has_ended, f"still running after {self.seen!r}")
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.descriptor)

    def _read(self, timeout_s: float) -> bool:
        """Take what there is within the time; False when there is nothing, or nobody who could say more."""
        if timeout_s <= 0 or not select.select([self.descriptor], [], [], timeout_s)[0]:
            return False
        try:
            self.seen += os.read(self.descriptor, 65536).decode(errors="replace")
        except OSError:
            return False  # the program has closed its side
        return True


@pytest.fixture
def chat(up: Run) -> Iterator[Terminal]:
    terminal = Terminal(up, "chat", SMOLLM2.id, "-t", "0", "-n", "400")
    yield terminal
    terminal.close()


def test_interactive_chat_streams_keeps_its_history_and_exits(chat: Terminal) -> None:
    chat.wait_for("> ")
    chat.type("What is the capital of Japan?\n")
    chat.wait_for("Tokyo")
    chat.wait_for("> ")
    chat.type("/stats\n")
    chat.wait_for(r"\d+ tokens, [\d,.]+ tok/s")
    chat.type("/nonsense\n")
    chat.wait_for("/help lists the commands")
    chat.type("/quit\n")
    assert chat.wait_end() == 0


def test_ctrl_c_stops_the_response_and_the_chat_continues(chat: Terminal) -> None:
    chat.wait_for("> ")
    chat.type("Write a very long story about the sea, with many chapters.\n")
    chat.wait_for(r"many chapters\.\r\n")  # the terminal's echo of the question
    chat.wait_for(r"\w+ \w+ \w+ \w+ \w+ \w+")
    chat.type("\x03")
    chat.wait_for("stopped")
    chat.type("/clear\n")
    chat.type("What is the capital of Japan?\n")
    chat.wait_for("Tokyo")
    chat.wait_for("> ")
    chat.type("\x04")
    assert chat.wait_end() == 0
