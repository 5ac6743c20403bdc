"""Runs tests in several processes that are forked after the collection: tests are imported and collected once.

The tests of a group run in one process, in order. Half of the processes take groups from the start of the queue, the
others from its end. So tests that mostly wait for programs, which come first, run alongside tests that mostly compute,
which come last.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Container
from contextlib import suppress
from itertools import chain, groupby, zip_longest
from multiprocessing.connection import Connection, wait
from types import FrameType
from typing import Any

import pytest
from _pytest import runner
from _pytest.config import create_terminal_writer

from cortex.ipc.child import die_with_parent

from .waiting import WAIT_S

Group = list[pytest.Item]

END_LIMIT_S = WAIT_S
"""A process that has not ended this long after its last test, or after an interrupt, is killed."""

NOTICE_S = 1.0
"""A signal that comes just before a process sleeps is noticed when it wakes, so waits are divided, and interrupts of
tests, whose waits are their own, are repeated."""


class ForkedRun:
    """The plugin of the process that collects: it forks, hands out groups, and reports the results."""

    def __init__(self, num_processes: int, group_of: Callable[[str], str], owners: Container[str] = ()) -> None:
        """`owners`: groups after which even what belongs to the session is torn down, because no other group uses it
        and programs that are left running take CPU time."""
        self._num_processes = num_processes
        self._group_of = group_of
        self._owners = owners

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.getoption("collectonly"):
            return None  # there is nothing to run, as pytest's own loop says
        groups = groupby(session.items, key=lambda item: self._group_of(item.nodeid))
        queue = deque(list(items) for _, items in groups)
        _folders(session).getbasetemp()  # before the fork: each process gets a folder in it
        processes = [
            _Process(session, self._ends_session, takes_last=bool(number % 2)) for number in range(self._num_processes)
        ]
        try:
            _report_all(session, {each.connection: each for each in processes}, queue)
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"while running {', '.join(filter(None, map(_Process.running, processes)))}"
            ) from None
        finally:
            _end_all(processes)
        return True

    def _ends_session(self, nodeid: str) -> bool:
        return self._group_of(nodeid) in self._owners


def _report_all(session: pytest.Session, processes: dict[Connection, _Process], queue: deque[Group]) -> None:
    while processes:
        for connection in wait(list(processes), NOTICE_S):
            assert isinstance(connection, Connection)
            process = processes[connection]
            try:
                message = connection.recv()
            except (EOFError, OSError):  # it may have been killed while it sent or received
                process.report_end()
                del processes[connection]
            else:
                process.receive(message, queue)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    for item in chain.from_iterable(queue):
        _fail(item, "did not run: every process has ended")


def _end_all(processes: list[_Process]) -> None:
    """The processes tear down what their tests have set up, and end; at once if the user interrupts again."""
    try:
        for each in processes:
            each.interrupt()
        for each in processes:
            each.join(interrupts=True)
    finally:
        for each in processes:
            each.kill()


class _Process:
    """A forked process, as seen from the process that collects."""

    def __init__(self, session: pytest.Session, ends_session: Callable[[str], bool], takes_last: bool) -> None:
        self._ends_session = ends_session
        self._takes_last = takes_last
        self._unfinished: Group = []
        """The test that runs, and the rest of its group."""
        self._last: pytest.Item | None = None
        self._config = session.config
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=self._run, args=(session, theirs, os.getpid()))
        self._process.start()
        theirs.close()

    def _run(self, session: pytest.Session, connection: Connection, parent_id: int) -> None:
        self.connection.close()  # so that the other end sees when the process that collects closes it
        _run_groups(session, connection, parent_id, self._ends_session)

    def receive(self, message: Any, queue: deque[Group]) -> None:
        match message:
            case None:
                group = [] if not queue else queue.pop() if self._takes_last else queue.popleft()
                self._unfinished = group
                with suppress(BrokenPipeError):  # its end is reported next
                    self.connection.send([item.nodeid for item in group])
            case list():
                convert = self._config.hook.pytest_report_from_serializable
                self._last = self._unfinished.pop(0)
                _log(self._last, [convert(config=self._config, data=report) for report in message])
            case dict():
                category = type(message.pop("category"), (Warning,), {})
                warning = warnings.WarningMessage(message.pop("text"), category, *message.pop("place"))
                kwargs = {"warning_message": warning, **message}
                self._config.hook.pytest_warning_recorded.call_historic(kwargs=kwargs)

    def report_end(self) -> None:
        """Reports tests that it has not finished as failed, and its last one if it failed after that."""
        ended = f"its process did not end within {END_LIMIT_S:g} s"
        if self.join():
            ended = f"its process ended with exit code {self._process.exitcode}"
        for number, item in enumerate(self._unfinished):
            _fail(item, f"{'did not run' if number else 'was running'}: {ended}")
        if self._process.exitcode != 0 and not self._unfinished and self._last is not None:
            _fail(self._last, f"was the last: {ended}")

    def running(self) -> str:
        """The test that runs, if any."""
        return self._unfinished[0].nodeid if self._unfinished else ""

    def interrupt(self) -> None:
        """Only the first time counts in the process: the next ones must not stop its teardown."""
        self.connection.close()
        if self._process.is_alive():
            assert self._process.pid is not None
            with suppress(ProcessLookupError):  # its end was awaited, and an interrupt came before that was noted
                os.kill(self._process.pid, signal.SIGINT)

    def join(self, interrupts: bool = False) -> bool:
        """Waits for its end. Returns whether it has ended."""
        limit = time.monotonic() + END_LIMIT_S
        while not wait([self._process.sentinel], NOTICE_S):
            if time.monotonic() > limit:
                return False
            if interrupts:
                self.interrupt()
        self._process.join()
        return True

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def _fail(item: pytest.Item, reason: str) -> None:
    _log(item, [pytest.TestReport(item.nodeid, item.location, {}, "failed", reason, "call")])


def _log(item: pytest.Item, reports: list[pytest.TestReport]) -> None:
    hook = item.config.hook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


def _run_groups(
    session: pytest.Session, connection: Connection, parent_id: int, ends_session: Callable[[str], bool]
) -> None:
    """In a forked process: runs the groups that it gets until there are no more."""
    die_with_parent(parent_id)
    signal.signal(signal.SIGINT, _interrupt_once)
    try:
        folders = _folders(session)
        folders._basetemp = folders.mktemp("process")  # noqa: SLF001
        plugins = session.config.pluginmanager
        plugins.unregister(name="terminalreporter")
        plugins.register(_Sender(session.config, connection), "terminalreporter")
        capture = plugins.getplugin("capturemanager")
        if capture is not None:  # its files are shared with the other processes
            capture.stop_global_capturing()
            capture.start_global_capturing()
            capture.suspend_global_capture()
        items = {item.nodeid: item for item in session.items}
        while group := _next_group(connection):
            # After the last test of a group, at most what belongs to the session stays set up.
            end = None if ends_session(group[0]) else session
            for nodeid, following in zip_longest(group, group[1:]):
                next_item = items[following] if following else end
                session.config.hook.pytest_runtest_protocol(item=items[nodeid], nextitem=next_item)
    except (KeyboardInterrupt, EOFError, ConnectionError):
        pass  # the run has been stopped
    finally:
        runner.pytest_sessionfinish(session)
        connection.close()


def _interrupt_once(signal_number: int, frame: FrameType | None) -> None:
    """Ctrl-C signals every process, and then the process that collects does: that must not stop a teardown."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _folders(session: pytest.Session) -> pytest.TempPathFactory:
    """The temporary folders of the run. pytest keeps those of the last runs and removes older ones."""
    folders: pytest.TempPathFactory = session.config._tmp_path_factory  # type: ignore[attr-defined]  # noqa: SLF001
    return folders


def _next_group(connection: Connection) -> list[str]:
    connection.send(None)
    nodeids: list[str] = connection.recv()
    return nodeids


class _Sender:
    """Sends the reports of each test, and warnings, in place of printing them."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection
        self._reports: list[dict[str, Any]] = []
        self._tw = create_terminal_writer(config, sys.stderr)  # where the time limit of a test writes all stacks

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self._config.hook
        self._reports.append(hook.pytest_report_to_serializable(config=self._config, report=report))

    def pytest_runtest_logfinish(self) -> None:
        self._connection.send(self._reports)
        self._reports = []

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        if when != "runtest":
            return  # those of the collection are recorded already, and are repeated to a plugin that registers later
        warning = {"text": str(warning_message.message), "category": warning_message.category.__name__}
        place = (warning_message.filename, warning_message.lineno)
        self._connection.send({**warning, "place": place, "when": when, "nodeid": nodeid, "location": location})
