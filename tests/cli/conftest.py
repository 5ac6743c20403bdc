"""A gateway with canned responses over real HTTP, to test the commands' side."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from click.testing import CliRunner, Result

from cortex.cli.cortex import cortex
from cortex.cli.failures import ExitCode, exit_code_of

from ..waiting import WAIT_S


class CannedGateway:
    """Responses by `(method, path)`, with or without its query: a JSON value, `(status, value)`, or bytes
    sent as an event stream."""

    def __init__(self) -> None:
        self.responses: dict[tuple[str, str], Any] = {}
        self.requests: list[tuple[str, str, Any, dict[str, str]]] = []
        self.num_missing_bytes = 0
        """How many of the last bytes of each response are not sent."""
        canned = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_args: object) -> None:
                """Log nothing."""

            def _respond(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                is_json = "json" in (self.headers.get("content-type") or "json")
                sent = (json.loads(body) if is_json else body) if body else None
                canned.requests.append((self.command, self.path, sent, {k.lower(): v for k, v in self.headers.items()}))
                missing = (404, {"error": {"message": f"no route {self.path}", "code": "route_not_found"}})
                by_path = canned.responses.get((self.command, self.path.partition("?")[0]), missing)
                response = canned.responses.get((self.command, self.path), by_path)
                status, value = response if isinstance(response, tuple) else (200, response)
                content = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content[: len(content) - canned.num_missing_bytes])

            do_GET = do_POST = do_PATCH = do_DELETE = _respond  # noqa: N815 - the names the base class looks for

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(WAIT_S)


@pytest.fixture
def gateway() -> Iterator[CannedGateway]:
    canned = CannedGateway()
    yield canned
    canned.close()


class Outcome:
    """Output and exit code of a command."""

    def __init__(self, result: Result, code: int, error: str) -> None:
        self.stdout = result.stdout
        self.stderr = result.stderr
        self.code = ExitCode(code)
        self.error = error


Invoke = Callable[..., Outcome]


@pytest.fixture(autouse=True)
def _log_of_its_own(restored_logging: None) -> None:
    """Commands run in the process of the tests, and `serve` holds its log."""


@pytest.fixture
def invoke(gateway: CannedGateway) -> Invoke:
    """Run `cortex ARGUMENTS` against the canned gateway."""

    def invoke(*arguments: str, stdin: str | None = None, env: dict[str, str] | None = None) -> Outcome:
        runner = CliRunner()
        result = runner.invoke(
            cortex, arguments, input=stdin, env={"CORTEX_URL": gateway.url, **(env or {})}, standalone_mode=False
        )
        code = exit_code_of(result.exception) if result.exception else (result.return_value or 0)
        return Outcome(result, code, str(result.exception or ""))

    return invoke
