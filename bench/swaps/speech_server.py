"""A speech server around espeak-ng that speaks OpenAI's `/v1/audio/speech`: `speech_server.py PORT MIB`.

It holds the memory that a neural voice would take."""

from __future__ import annotations

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._respond(200, "application/json", b'{"status": "ok"}')

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/v1/audio/speech":
            self._respond(404, "application/json", b'{"error": {"message": "no such route"}}')
            return
        spoken = subprocess.run(
            ["espeak-ng", "--stdout", "-v", request.get("voice", "en"), "--stdin"],
            input=request["input"].encode(),
            capture_output=True,
            check=True,
        )
        self._respond(200, "audio/wav", spoken.stdout)

    def _respond(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    held = b"x" * (int(sys.argv[2]) << 20)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
