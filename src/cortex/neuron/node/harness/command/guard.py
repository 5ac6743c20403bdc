"""The parent of a server: a program that starts it and leaves no process of it behind.

The node runs this file by its path. Its first argument is the length of a cleanup command, which ends remains of the
server elsewhere, such as a container. That command follows, then the server's own command. A byte on stdin asks the
server to end (SIGTERM to its group); the end of stdin, which also comes when the node is killed, kills everything. When
the server has ended, so do the processes that it left behind, its folder for temporary files is removed, and this
program ends with its status. It imports nothing of this package, so that it starts in milliseconds.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_prctl = getattr(ctypes.CDLL(None), "prctl", None)
"""None on systems without this call. Looked up at import, because little is safe between fork and exec."""
NOT_STARTED = 127
"""The status of a command that cannot be started, as in shells."""


_CLEAN_S = 60.0


def main(arguments: list[str]) -> int:
    num_cleaning = int(arguments[0])
    cleaning, command = arguments[1 : 1 + num_cleaning], arguments[1 + num_cleaning :]
    folder = os.path.join(os.environ.get("TMPDIR") or "/tmp", f"cortex-{os.urandom(6).hex()}")
    try:
        os.mkdir(folder, 0o700)
    except OSError as error:
        sys.stderr.write(f"cannot make a folder for temporary files in {os.path.dirname(folder)}: {error.strerror}\n")
        return NOT_STARTED
    try:
        code = _run(command, {**os.environ, "TMPDIR": folder})
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if cleaning and code != NOT_STARTED:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            nothing = subprocess.DEVNULL
            subprocess.run(cleaning, stdin=nothing, stdout=nothing, stderr=nothing, timeout=_CLEAN_S, check=False)
    return code


def _run(command: list[str], env: dict[str, str]) -> int:
    if _prctl is not None:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the server become children of this process
    child_ended, waker = os.pipe()
    os.set_blocking(waker, False)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which the server would inherit
    try:
        server = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, env=env, start_new_session=True, preexec_fn=_die_with_this
        )
    except OSError as error:
        sys.stderr.write(f"cannot start {command[0]}: {error.strerror}\n")
        return NOT_STARTED
    code: int | None = None
    while code is None:
        ready, _, _ = select.select([sys.stdin.fileno(), child_ended], [], [])
        if child_ended in ready:
            os.read(child_ended, 4096)
        code = _reap(server.pid)
        if sys.stdin.fileno() in ready and code is None:
            if not os.read(sys.stdin.fileno(), 64):
                break
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGTERM)
    try:
        while rest := _children():
            for process in rest:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            # The children of those that ended are children of this process now.
            code = _reap(server.pid, wait=True) or code
    except OSError:  # this system does not list them: only the server's group can be found
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, signal.SIGKILL)
        while code is None:
            code = _reap(server.pid, wait=True)
    return 128 + signal.SIGKILL if code is None else code


def _die_with_this() -> None:
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _reap(server: int, *, wait: bool = False) -> int | None:
    """The exit status of the server, if it has ended. With `wait`, returns when some process has."""
    code: int | None = None
    with contextlib.suppress(ChildProcessError):
        process, status = os.waitpid(-1, 0 if wait else os.WNOHANG)
        while process:
            if process == server:
                ended = os.waitstatus_to_exitcode(status)
                code = ended if ended >= 0 else 128 - ended
            process, status = os.waitpid(-1, os.WNOHANG)
    return code


def _children() -> list[int]:
    """Raises OSError on systems without this information."""
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(process) for process in file.read().split()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
