"""Starting the daemon's own programs beside it: the one that workers are forked from, and those that tokenise."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping

from cortex.telemetry import logs


async def start_child(
    module: str, *arguments: str, environment: Mapping[str, str]
) -> tuple[asyncio.subprocess.Process, socket.socket]:
    """`python -m module`, and our end of its control socket. It imports from where we do and logs as we do.

    `environment` is added to the daemon's own. Raises OSError where no process can be made.
    """
    log_format, log_level = logs.in_use()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        try:
            # A session of its own: a signal to the terminal's group must not reach it before the daemon decides.
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", module),
                *("--control", str(theirs.fileno())),
                *("--parent", str(os.getpid())),
                *arguments,
                *("--log-format", log_format),
                *("--log-level", log_level),
                stdin=asyncio.subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    return process, ours
