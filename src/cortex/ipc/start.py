"""Starts child processes that end with this one: `child` is their side."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping

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
    log_format, log_level = logs.in_use()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-P", "-m", module),
                *("--control", str(theirs.fileno())),
                *("--parent", str(os.getpid())),
                *("--log-format", log_format),
                *("--log-level", log_level),
                *arguments,
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **(environment or {})},
                start_new_session=True,  # Ctrl-C signals a whole process group; the parent decides about its children
            )
        except BaseException:
            ours.close()
            raise
    return process, ours
