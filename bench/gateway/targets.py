"""What is measured: the upstream itself, nginx in front of it, our data path alone, and the whole gateway."""

from __future__ import annotations

import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent.parent / "src"
CPUS = sorted(os.sched_getaffinity(0))
TOOLS_CPUS = CPUS[:1]
START_S = 15.0


class Target(NamedTuple):
    """Something that listens on `port`; its cost is that of `process` and its children (None for the upstream)."""

    name: str
    port: int
    process: subprocess.Popen[bytes] | None


def spawn(command: list[str], cpus: list[int], *, stdout: int = subprocess.DEVNULL) -> subprocess.Popen[bytes]:
    """Start `command` pinned to `cpus`, with room for a few thousand connections."""

    def prepare() -> None:
        os.sched_setaffinity(0, cpus)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(16384, hard) if hard > 0 else 16384, hard))

    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.Popen(command, stdout=stdout, env=environment, preexec_fn=prepare)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process that we started; kill it if it does not end."""
    process.terminate()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for_response(port: int, process: subprocess.Popen[bytes]) -> None:
    """Return once the model list is served. Raises TimeoutError or RuntimeError when that does not happen."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args!r} ended with status {process.returncode}")
        try:
            with socket.create_connection(("127.0.0.1", port), 1) as connection:
                connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n")
                response = b""
                while block := connection.recv(65536):
                    response += block
            if response.startswith(b"HTTP/1.1 200") and b'"bench"' in response:
                return
        except OSError:
            pass  # not up yet
        time.sleep(0.1)
    raise TimeoutError(f"{process.args!r} did not serve the model list within {START_S:g} s")


@contextmanager
def running(name: str, command: list[str], port: int) -> Iterator[Target]:
    """A gateway for the duration of the block, on the last CPU."""
    process = spawn(command, CPUS[-1:])
    try:
        wait_for_response(port, process)
        yield Target(name, port, process)
    finally:
        stop(process)


def nginx_command(folder: Path, upstream_port: int, port: int) -> list[str] | None:
    """nginx set up as a plain unbuffered proxy; None where it is not installed."""
    program = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")
    if program is None:
        return None
    configuration = folder / "nginx.conf"
    configuration.write_text(f"""
daemon off;
worker_processes 1;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  upstream node {{ server 127.0.0.1:{upstream_port}; keepalive 256; keepalive_requests 10000000; }}
  server {{
    listen 127.0.0.1:{port};
    keepalive_requests 10000000;
    location / {{
      proxy_pass http://node;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
    }}
  }}
}}
""")
    return [program, "-c", str(configuration), "-p", str(folder), "-e", str(folder / "error.log")]


def bare_command(folder: Path, upstream_port: int, port: int) -> list[str] | None:  # noqa: ARG001 - as the others
    """Our data path without anything around it."""
    return [sys.executable, str(HERE / "bare.py"), f"http://127.0.0.1:{upstream_port}", str(port)]


def cortex_command(folder: Path, upstream_port: int, port: int) -> list[str] | None:
    """The whole gateway: routing, metrics and accounting on."""
    configuration = folder / "cortex.toml"
    configuration.write_text(f"""
[gateway]
listen = "127.0.0.1:{port}"
metrics_listen = "127.0.0.1:{free_port()}"

[[neurons]]
name = "bench"
kind = "openai"
endpoint = "http://127.0.0.1:{upstream_port}"
""")
    return [sys.executable, "-m", "cortex.gateway", "--config", str(configuration)]


COMMANDS: dict[str, Callable[[Path, int, int], list[str] | None]] = {
    "nginx": nginx_command,
    "bare": bare_command,
    "cortex": cortex_command,
}
"""What each row measures: (scratch folder, upstream's port, port to listen on) -> command, or None where it cannot be
measured."""
