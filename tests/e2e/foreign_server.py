"""An OpenAI-compatible server that knows chat and embeddings only. Its model calls a tool, then repeats the result."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sesame"
CONTEXT_TOKENS = 32_768
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 3,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 4},
}
MODELS = [{"id": "org/agent", "object": "model", "max_model_len": CONTEXT_TOKENS}, {"id": "org/embedder"}]


def message_for(body: dict[str, Any]) -> dict[str, Any]:
    """What the scripted model says to a conversation."""
    results = [message["content"] for message in body["messages"] if message["role"] == "tool"]
    if results:
        return {"reasoning_content": "There it is.", "content": f"The tool said: {results[-1]}"}
    if not body.get("tools"):
        return {"content": "Hello."}
    function = {"name": body["tools"][0]["function"]["name"], "arguments": '{"city": "Oslo", "days": 2}'}
    call = {"id": "call_1", "type": "function", "function": function}
    return {"reasoning_content": "I need the tool.", "content": "One moment.", "tool_calls": [call]}


def deltas_of(message: dict[str, Any]) -> list[dict[str, Any]]:
    """The same, in pieces."""
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    for field in ("reasoning_content", "content"):
        text = message.get(field, "")
        deltas += [{field: text[start : start + 5]} for start in range(0, len(text), 5)]
    for index, call in enumerate(message.get("tool_calls", ())):
        arguments = call["function"]["arguments"]
        deltas.append({"tool_calls": [{**call, "index": index, "function": {**call["function"], "arguments": ""}}]})
        pieces = (arguments[start : start + 5] for start in range(0, len(arguments), 5))
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in pieces]
    return deltas


class ForeignServer:
    """Listens on a free port until closed. `seen` are the bodies it was asked with."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []
        seen = self.seen

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: object) -> None:
                pass

            def do_GET(self) -> None:
                allowed = self.headers.get("authorization") == f"Bearer {KEY}"
                self._json({"data": MODELS} if allowed else {"error": {"message": "no key"}}, 200 if allowed else 401)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                seen.append(body)
                if self.path == "/v1/embeddings":
                    given = body["input"] if isinstance(body["input"], list) else [body["input"]]
                    data = [{"object": "embedding", "index": n, "embedding": [0.5, n]} for n in range(len(given))]
                    self._json({"object": "list", "model": body["model"], "data": data, "usage": USAGE})
                elif self.path != "/v1/chat/completions":
                    self._json({"error": {"message": f"there is no {self.path}"}}, 404)
                elif body.get("stream"):
                    self._stream(body)
                else:
                    message = {"role": "assistant", **message_for(body)}
                    reason = "tool_calls" if "tool_calls" in message else "stop"
                    choice = {"index": 0, "message": message, "finish_reason": reason}
                    self._json({"id": "x", "created": 1, "model": body["model"], "choices": [choice], "usage": USAGE})

            def _json(self, value: object, status: int = 200) -> None:
                data = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _stream(self, body: dict[str, Any]) -> None:
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.send_header("connection", "close")
                self.end_headers()
                message = message_for(body)
                for delta in deltas_of(message):
                    self._event(body, [{"index": 0, "delta": delta, "finish_reason": None}])
                reason = "tool_calls" if "tool_calls" in message else "stop"
                self._event(body, [{"index": 0, "delta": {}, "finish_reason": reason}])
                if (body.get("stream_options") or {}).get("include_usage"):
                    self._event(body, [], usage=USAGE)
                self.wfile.write(b"data: [DONE]\n\n")

            def _event(self, body: dict[str, Any], choices: list[Any], **more: Any) -> None:
                chunk = {"id": "x", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
                self.wfile.write(b"data: " + json.dumps({**chunk, "choices": choices, **more}).encode() + b"\n\n")
                self.wfile.flush()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
