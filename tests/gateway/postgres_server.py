"""A real PostgreSQL server for the tests that need one, from the system's package, on a temporary directory."""

from __future__ import annotations

import getpass
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from ..waiting import WAIT_S


def _binary(name: str) -> str | None:
    installed = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), reverse=True)
    return str(installed[0]) if installed else shutil.which(name)


def _unprivileged() -> tuple[str, dict[str, Any]]:
    """The user to run as, and the command prefix: the server does not run as root."""
    if os.geteuid() != 0:
        return getpass.getuser(), {}
    for name in ("postgres", "nobody"):
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return name, {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": [], "cwd": "/"}
    pytest.skip("PostgreSQL will not run as root, and there is no other user to run it as")


@contextmanager
def frozen(postgres_url: str) -> Iterator[None]:
    """Every process of the server is stopped: connections stay open, new ones are accepted, nothing responds."""
    home = postgres_url.partition("host=")[2].partition("&")[0]
    server = int((Path(home) / "data" / "postmaster.pid").read_text().split()[0])
    stopped = [server]
    os.kill(server, signal.SIGSTOP)  # first: it starts no more processes then
    try:
        children = Path(f"/proc/{server}/task/{server}/children").read_text()
        for child in map(int, children.split()):
            os.kill(child, signal.SIGSTOP)
            stopped.append(child)
        yield
    finally:
        for process in reversed(stopped):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    pytest.importorskip(
        "psycopg", reason="needs the PostgreSQL driver: run `pip install '.[postgres]'` in a checkout of cortex"
    )
    initdb, pg_ctl = _binary("initdb"), _binary("pg_ctl")
    if initdb is None or pg_ctl is None:
        pytest.skip("no PostgreSQL server is installed: apt install postgresql")
    user, run_as = _unprivileged()
    home = Path(tempfile.mkdtemp(prefix="cortex-postgres-"))
    if run_as:
        os.chown(home, run_as["user"], run_as["group"])
    data = home / "data"

    def run(*command: str) -> None:
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=WAIT_S, **run_as)

    try:
        run(initdb, "-D", str(data), "-A", "trust", "-U", user, "--no-sync", "-E", "UTF8")
        options = f"-c listen_addresses= -c unix_socket_directories={home} -c fsync=off"
        run(pg_ctl, "-D", str(data), "-o", options, "-l", str(home / "log"), "-w", "start")
        try:
            yield f"postgresql:///postgres?host={home}&user={user}"
        finally:
            run(pg_ctl, "-D", str(data), "-m", "immediate", "-w", "stop")
    finally:
        shutil.rmtree(home, ignore_errors=True)


@pytest.fixture(params=["sqlite", "postgres"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The location of an empty database of each kind."""
    if request.param == "sqlite":
        return str(tmp_path / "state" / "gateway.db")
    url: str = request.getfixturevalue("postgres_url")
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA public CASCADE; CREATE SCHEMA public")
    return url
