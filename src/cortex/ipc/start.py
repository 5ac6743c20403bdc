"""Starts child processes that end with this one: `child` is their side."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from cortex.telemetry import logs


async def start_child(
    module: str,
    *arguments: str,
    environment: Mapping[str, str] | None = None,
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """Starts `python -m module`; returns the process and this side's end of its control socket, of type SEQPACKET.

    The child imports from the same paths and logs in the same format as this process. `environment` is added to this
    process's own. Raises OSError when no process can be created.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            process = await asyncio.create_subprocess_exec(
                *_command(module, theirs, arguments),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=_with_import_paths({**os.environ, **(environment or {})}),
                start_new_session=True,  # Ctrl-C signals a whole process group; the parent decides about its children
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def start_child_of_thread(
    module: str, *arguments: str, environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Like `start_child`, for a thread without a loop, which must outlive the child. The control socket is a stream,
    and `environment` is all that the child has."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        try:
            process = subprocess.Popen(
                _command(module, theirs, arguments),
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=_with_import_paths(environment),
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours


def _command(module: str, control: socket.socket, arguments: Sequence[str]) -> list[str]:
    log_format, log_level = logs.in_use()
    return [
        sys.executable,
        *("-P", "-m", module),
        *("--control", str(control.fileno())),
        *("--parent", str(os.getpid())),
        *("--log-format", log_format),
        *("--log-level", log_level),
        *arguments,
    ]


def _with_import_paths(environment: Mapping[str, str]) -> dict[str, str]:
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
