"""A small model that torch's launcher divides among hosts: each rank has a part of one matrix, and Gloo sums them."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

import torch
import torch.distributed as library

WIDTH = 64


def main() -> None:
    library.init_process_group("gloo")
    rank, size = library.get_rank(), library.get_world_size()
    weights = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)).tensor_split(size, dim=1)[rank]
    print(f"rank {rank} of {size} has {tuple(weights.shape)}", flush=True)

    def step(token: int) -> int:
        """All ranks make the same call. The token that follows."""
        given = torch.tensor([token])
        library.broadcast(given, 0)
        hidden = torch.zeros(WIDTH)
        hidden[int(given) % WIDTH] = 1.0
        part = weights @ hidden.tensor_split(size)[rank]
        library.all_reduce(part)
        return int(part.argmax())

    if rank:
        while True:
            step(0)

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.reply({"status": "ok"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or b"{}")
            tokens, token = [], 1
            for _ in range(int(body.get("max_tokens") or 4)):
                token = step(token)
                tokens.append(str(token))
            message = {"role": "assistant", "content": " ".join(tokens)}
            usage = {"prompt_tokens": 1, "completion_tokens": len(tokens), "total_tokens": 1 + len(tokens)}
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            self.reply({"id": "1", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage})

        def reply(self, value: object) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    step(0)
    HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
