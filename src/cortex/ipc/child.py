"""Child processes that end with their parent.

`start_child` runs a module of this package as a child process; the module's `main` calls `attach_to_parent` first. The
child's side is here, without asyncio, which most children do not need.
A program that knows nothing of its parent calls `die_with_parent` between fork and exec.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import signal
import socket

from cortex.telemetry import logs

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_prctl = getattr(ctypes.CDLL(None), "prctl", None)
"""None on systems without this call. Looked up here because little is safe between fork and exec."""


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
