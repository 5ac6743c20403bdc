"""Real child processes, and what ends them."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from cortex.ipc.start import start_child

from ..processes import alive, wait_end
from ..waiting import WAIT_S

CHILD = """
import argparse, os, time
from cortex.ipc.child import attach_to_parent

options, control = attach_to_parent(argparse.ArgumentParser())
control.sendall(b"ready")
while control.recv(1 << 10):
    pass
"""

PARENT = """
import asyncio, time
from cortex.ipc.start import start_child

async def main():
    process, control = await start_child("ipc_test_child")
    await asyncio.to_thread(control.recv, 16)
    print(process.pid, flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""

PARENT_THREAD = """
import os, threading, time
from cortex.ipc.start import start_child_of_thread

def run():
    process, control = start_child_of_thread("ipc_test_child", environment=os.environ)
    control.recv(16)
    print(process.pid, flush=True)
    time.sleep(3600)

threading.Thread(target=run).start()
"""


async def test_child_ignores_termination_signals_and_exits_when_its_socket_closes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ipc_test_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    process, control = await start_child("ipc_test_child")
    with control:
        assert await asyncio.to_thread(control.recv, 16) == b"ready"
        assert os.getsid(process.pid) == process.pid
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            process.send_signal(number)
    assert await asyncio.wait_for(process.wait(), WAIT_S) == 0


@pytest.mark.parametrize("program", [PARENT, PARENT_THREAD], ids=["loop", "thread"])
def test_child_is_killed_with_its_parent(tmp_path: Path, program: str) -> None:
    # The child's module never exits on its own: only the kernel can end it.
    (tmp_path / "ipc_test_child.py").write_text(CHILD + "time.sleep(3600)\n")
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])},
    )
    with parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
    wait_end(child)


def test_helper_processes_start_without_asyncio_and_settings() -> None:
    programs = "cortex.ipc.fork_server, cortex.ipc.helper_process"
    modules = f"{programs}, cortex.parsing.functions, cortex.neuron.tokenizer_process.service"
    check = f"import sys, {modules}; print(*sys.modules)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    imported = subprocess.run(
        [sys.executable, "-c", check], stdout=subprocess.PIPE, text=True, check=True, env=environment
    )
    assert not {"asyncio", "cortex.settings"} & set(imported.stdout.split())
