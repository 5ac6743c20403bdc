"""A server that speaks OpenAI chat and takes files, and fails as it is told to. Imports only what starts fast."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

parser = argparse.ArgumentParser()
parser.add_argument("--port", "--listen-port", type=int, default=int(os.environ.get("SERVER_PORT", "0")))
parser.add_argument("--log", default="", help="a file that gets a line for each response whose client left")
parser.add_argument("--say", default="ready")
parser.add_argument("--exits", type=int)
parser.add_argument("--is-never-healthy", action="store_true")
parser.add_argument("--ignores-sigterm", action="store_true")
parser.add_argument("--holds-mb", type=int, default=0)
parser.add_argument("--forks", action="store_true")
options, others = parser.parse_known_args()
state = "awake"
was_checked = threading.Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None: ...

    def do_GET(self) -> None:
        if self.path.startswith("/v1/"):
            self._echo()
            return
        was_checked.set()
        metadata = {"pid": os.getpid(), "argv": sys.argv[1:], "state": state, "env": dict(os.environ)}
        self._json(503 if options.is_never_healthy else 200, metadata)

    def do_POST(self) -> None:
        global state
        if self.path.split("?")[0] in ("/sleep", "/wake_up"):
            refuses = "refuses" in self.path
            state = state if refuses else self.path.strip("/")
            self.rfile.read(int(self.headers["content-length"]))
            self._json(500 if refuses else 200, {})
            return
        if self.path != "/v1/chat/completions":
            self._echo()
            return
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = body["messages"][-1]["content"]
        if text == "hang":
            time.sleep(3600)
        if text == "slow":
            was_checked.clear()
            was_checked.wait()
            time.sleep(1)  # longer than a limit that ends with the check
        if text == "freeze":
            os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(3600)  # another thread may take the signal, and this one would respond first
        if text.startswith("grow "):
            global held
            held = b"x" * (int(text.split()[1]) << 20)
        if text == "crash":
            print("it is time to crash", flush=True)
            os._exit(3)
        if text == "close":
            self.close_connection = True
        elif text == "reject":
            self._json(400, {"error": {"message": "too spicy"}})
        elif body.get("stream"):
            self._stream(body, text)
        else:
            usage = {"prompt_tokens": 7, "completion_tokens": 2}
            message = {"role": "assistant", "content": json.dumps(body)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            reply = {"id": "x", "model": "y", "created": 1, "choices": [choice], "usage": usage}
            if text == "timings":  # as llama.cpp reports them
                reply["timings"] = {"prompt_ms": 0.001, "predicted_ms": 0.002}
            self._json(200, reply)

    def do_PUT(self) -> None:
        self._echo()

    def _echo(self) -> None:
        """What arrived, as JSON; of a body only its length, its hash and its ends, so that files may be large."""
        num_bytes, digest, first, last = int(self.headers.get("content-length", 0)), hashlib.sha256(), b"", b""
        remaining = num_bytes
        while remaining:
            data = self.rfile.read(min(remaining, 1 << 16))
            remaining -= len(data)
            digest.update(data)
            first, last = (first + data)[:4096], (last + data)[-4096:]
        if b"crash" in first:
            os._exit(3)
        if self.path == "/v1/audio/speech" and b"large" in first:
            self.send_response(200)
            self.send_header("content-type", "audio/wav")
            self.end_headers()
            for _ in range(256):
                self.wfile.write(b"\0" * (1 << 16))
            self.close_connection = True
            return
        received = {"method": self.command, "path": self.path, "headers": dict(self.headers.items())}
        ends = {"first": first.decode("latin-1"), "last": last.decode("latin-1")}
        metadata = {**received, **ends, "num_bytes": num_bytes, "sha256": digest.hexdigest()}
        if "embeddings" in self.path:
            metadata["data"] = [{"index": 0, "embedding": [0.5, -1.0]}]
            metadata["usage"] = {"prompt_tokens": 7, "total_tokens": 7}
        self._json(400 if b"spicy" in first else 404 if "absent" in self.path else 200, metadata)

    def _stream(self, body: Any, text: str) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        pieces = ["a", "b", "c"] if text != "forever" else ["on and on "] * 100_000
        try:
            for piece in pieces:
                self._event({"choices": [{"index": 0, "delta": {"content": piece}}]})
                if text == "forever":
                    time.sleep(0.01)
        except OSError:
            Path(options.log).write_text("the client left")
            return
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        if (body.get("stream_options") or {}).get("include_usage"):
            self._event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 3}})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _event(self, chunk: Any) -> None:
        chunk = {"id": "x", "model": "y", "created": 1, **chunk}
        self.wfile.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
        self.wfile.flush()

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if options.ignores_sigterm:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if options.forks and os.fork() == 0:
    os.setsid()
    Path(options.log).write_text(str(os.getpid()))
    while True:
        signal.pause()
held = b"x" * (options.holds_mb << 20)
print(options.say, flush=True)
if options.exits is not None:
    sys.exit(options.exits)
ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()
