"""Child processes that end with their parent.

`start_child` runs a module of this package beside its parent; the module's `main` calls `attach_to_parent` first.
A program that knows nothing of its parent calls `die_with_parent` between fork and exec.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import faulthandler
import os
import signal
import socket
import sys
from collections.abc import Mapping

from cortex.telemetry import logs

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_prctl = getattr(ctypes.CDLL(None), "prctl", None)
"""None on systems without this call. Looked up here because little is safe between fork and exec."""


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


def attach_to_parent(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, socket.socket]:
    """The first call in the `main` of a module run by `start_child`: the parsed arguments and the control socket.

    From here on this process logs as its parent does, is killed when the parent dies, and ignores the signals with
    which terminals and service managers stop all processes at once.
    """
    parser.add_argument("--control", type=int, required=True, help="file descriptor of the control socket")
    parser.add_argument("--parent", type=int, required=True, help="process id of the parent")
    parser.add_argument("--log-format", default="text")
    parser.add_argument("--log-level", default="INFO")
    options = parser.parse_args()
    die_with_parent(options.parent)
    logs.configure(options.log_format, options.log_level)
    faulthandler.enable()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return options, socket.socket(fileno=options.control)


def die_with_parent(parent_id: int, death_signal: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel for `death_signal` when the parent of this process dies; exits at once if it has died already."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent_id:
        os._exit(0)


def name_thread(name: str) -> None:
    """Names the calling thread for `top -H` and debuggers; the first thread's name is the process's."""
    if _prctl is not None:
        _prctl(_PR_SET_NAME, name.encode())
