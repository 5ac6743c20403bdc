"""The entry points of the commands, as the installed scripts call them."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from cortex.cli.cortex import cortex

from ..waiting import WAIT_S

INTERRUPTED_IMPORT = """
import signal, sys, time

signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background inherits that it is ignored

class SlowImport:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            print("importing", flush=True)
            time.sleep(3600)

sys.meta_path.insert(0, SlowImport())
from cortex.cli.entry import {program}
{program}()
"""


@pytest.mark.parametrize("program", ["cortex", "neuron"])
def test_interrupt_during_imports_prints_no_traceback(program: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED_IMPORT.format(program=program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "importing\n"
        child.send_signal(signal.SIGINT)
        _, error = child.communicate(timeout=WAIT_S)
    assert error == ""
    assert child.returncode == -signal.SIGINT


@pytest.mark.parametrize("program", ["cortex", "neuron"])
def test_entry_point_runs_the_command_line(program: str) -> None:
    code = f"import sys; sys.argv = [{program!r}, '-h']; from cortex.cli.entry import {program}; {program}()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=WAIT_S)
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: {program}")
    assert "-h, --help" in done.stdout


def test_every_command_is_imported_when_it_is_needed() -> None:
    names = cortex.list_commands(click.Context(cortex))
    assert {"up", "status", "run", "import", "stop"} <= set(names)
    for name in names:
        command = cortex.get_command(click.Context(cortex), name)
        assert command is not None
        assert command.name == ("unload" if name == "stop" else name)
    assert cortex.get_command(click.Context(cortex), "nonsense") is None


def test_option_for_ollamas_port_leaves_a_configured_address(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        addresses = f'listen = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\nollama_listen = "127.0.0.1:{port}"\n'
        (tmp_path / "cortex.toml").write_text(f"[gateway]\n{addresses}")
        code = "import sys; sys.argv = ['cortex', 'serve', '--ollama']; from cortex.cli.entry import cortex; cortex()"
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S
        )
    assert done.returncode != 0
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr


def test_nearest_command_is_suggested_for_an_unknown_one() -> None:
    result = CliRunner().invoke(cortex, ["statsu"])
    assert result.exit_code == 2
    assert "Did you mean 'status'?" in result.output
