#!/usr/bin/env python3
"""A stand-in for servers that run one model on several hosts: vLLM with and without Ray, SGLang, llama.cpp over RPC.

It takes the arguments of the real ones, meets its other members as they do, and fails as they do: a leader that loses a
member ends, a member that loses its leader ends, a member that is frozen holds up every response. `ggml-rpc-server`
waits for leaders, one after another. It needs the standard library only, so that it starts in milliseconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

VERSION = os.environ.get("STAND_IN_VERSION", "1.2.3")


def main() -> None:
    program = Path(sys.argv[0]).name
    if sys.argv[1:] in (["--version"], ["version"]):
        print_version(program)
        return
    if program == "ray":
        if sys.argv[1] == "health-check":
            await_head(sys.argv[sys.argv.index("--address") + 1])
        else:
            start_ray()
        return
    if program == "ggml-rpc-server":
        serve_rpc()
        return
    options = arguments(program)
    tempfile.mkstemp()  # real ones leave sockets and folders
    print(f"{program} rank {options.rank} of {options.nodes}", flush=True)
    if options.fails == options.rank:
        sys.exit("no such model: it fails on purpose")
    held = bytearray(b"x") * (options.megabytes << 20)  # noqa: F841 - it takes memory, as weights do
    if options.rank > 0:
        work(options)
    if options.distributed_executor_backend == "ray":
        members = [through_head(f"driver {int(options.pipeline_parallel_size) - 1}")]
    else:
        members = [connected(*address) for address in options.rpc] if options.rpc else met(options)
    print("all members are there", flush=True)
    serve(options, members)


def print_version(program: str) -> None:
    """As each of them does, also what follows and is equal for different versions."""
    if program == "llama-server":
        print(f"version: {VERSION} (4f2a1c0)\nbuilt with cc (GCC) 14.2.0 for x86_64-linux-gnu", file=sys.stderr)
    elif program == "sglang":
        print(f"sglang version: {VERSION}\ngit revision: N/A")
    else:
        print(f"ray, version {VERSION}" if program == "ray" else VERSION)


def await_head(address: str) -> None:
    """Ends with status 1 for a head that is not there, or a port that anything else holds."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), 5) as peer:
        peer.sendall(b"health\n")
        if peer.recv(1) != b"+":
            sys.exit(1)


def start_ray() -> None:
    parser = argparse.ArgumentParser("ray", allow_abbrev=False)
    parser.add_argument("verb", choices=["start"])
    for name in ("--address", "--port", "--node-ip-address", "--num-gpus", "--temp-dir", "--include-dashboard"):
        parser.add_argument(name)
    for name in ("--head", "--block", "--disable-usage-stats"):
        parser.add_argument(name, action="store_true")
    options = parser.parse_args()
    (Path(options.temp_dir) / "session").mkdir()
    if not options.head:
        os.environ["RAY_ADDRESS"] = options.address
        answer(through_head("member"))
        sys.exit("the head is gone")
    lead_ray(socket.create_server((options.node_ip_address, int(options.port))))


def lead_ray(listener: socket.socket) -> None:
    """Passes what a driver sends to all members, and one of their responses back."""
    members: list[socket.socket] = []
    drivers: list[tuple[socket.socket, int]] = []
    while True:
        peer = listener.accept()[0]
        kind, _, count = peer.makefile().readline().partition(" ")
        if kind.strip() == "member":
            members.append(peer)
        elif kind == "health\n":
            peer.sendall(b"+")
            peer.close()
        elif kind == "driver":
            drivers.append((peer, int(count)))
        if drivers and len(members) >= drivers[0][1]:
            driver = drivers.pop()[0]
            driver.sendall(b"+")
            threading.Thread(target=relay, args=(driver, members), daemon=True).start()


def relay(driver: socket.socket, members: list[socket.socket]) -> None:
    with contextlib.suppress(OSError):
        while True:
            ready, _, _ = select.select([driver, *members], [], [])
            if any(not each.recv(1, socket.MSG_PEEK) for each in ready):
                break
            data = driver.recv(1)
            for member in members:
                member.sendall(data)
            if not all(member.recv(1) for member in members):
                break
            driver.sendall(data)
    driver.close()


def through_head(hello: str) -> socket.socket:
    host, _, port = os.environ["RAY_ADDRESS"].rpartition(":")
    peer = connected(host, int(port))
    peer.settimeout(None)
    peer.sendall(f"{hello}\n".encode())
    if hello != "member" and peer.recv(1) != b"+":
        sys.exit("the members of Ray do not come")
    return peer


def arguments(program: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(program, allow_abbrev=False)
    if program in ("vllm", "sglang"):
        parser.add_argument("verb", choices=["serve"])
    if program == "vllm":
        parser.add_argument("path")
        for name in ("--pipeline-parallel-size", "--tensor-parallel-size", "--gpu-memory-utilization"):
            parser.add_argument(name)
        parser.add_argument("--enable-sleep-mode", action="store_true")
        parser.add_argument("--headless", action="store_true")
        parser.add_argument("--distributed-executor-backend", default="")
        parser.add_argument("--master-addr")
        parser.add_argument("--master-port", type=int)
    elif program == "sglang":
        parser.add_argument("--model-path")
        for name in ("--pp-size", "--tp-size", "--mem-fraction-static", "--dist-init-addr"):
            parser.add_argument(name)
    else:
        parser.add_argument("--model")
        parser.add_argument("--n-gpu-layers")
        parser.add_argument("--rpc", default="")
        parser.add_argument("--jinja", action="store_true")
    parser.add_argument("--served-model-name", "--alias")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int)
    parser.add_argument("--nnodes", dest="nodes", type=int, default=1)
    parser.add_argument("--node-rank", dest="rank", type=int, default=0)
    parser.set_defaults(distributed_executor_backend="")
    parser.add_argument("--megabytes", type=int, default=1)
    parser.add_argument("--fails", type=int, default=-1)
    options = parser.parse_args()
    if program == "sglang" and options.dist_init_addr:
        options.master_addr, _, port = options.dist_init_addr.rpartition(":")
        options.master_port = int(port)
    if program == "vllm" and options.nodes > 1 and options.headless != (options.rank > 0):
        sys.exit("only ranks other than 0 are headless")
    addresses = (address.rpartition(":") for address in getattr(options, "rpc", "").split(",") if address)
    options.rpc = [(host, int(port)) for host, _, port in addresses]
    return options


def met(options: argparse.Namespace) -> list[socket.socket]:
    if options.nodes == 1:
        return []
    with socket.create_server((options.master_addr, options.master_port)) as listener:
        return [listener.accept()[0] for _ in range(options.nodes - 1)]


def connected(host: str, port: int) -> socket.socket:
    try:
        return socket.create_connection((host, port), 10)
    except OSError as error:
        sys.exit(f"cannot connect to {host}:{port}: {error}")


def work(options: argparse.Namespace) -> None:
    deadline = time.monotonic() + 600
    while True:
        try:
            leader = socket.create_connection((options.master_addr, options.master_port), 5)
            leader.settimeout(None)
            if leader.recv(1, socket.MSG_PEEK):  # not the node, which held the port until now
                break
        except OSError:
            pass
        if time.monotonic() > deadline:
            sys.exit("the leader does not listen")
        time.sleep(0.05)
    answer(leader)
    sys.exit("the leader is gone")


def answer(leader: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := leader.recv(1):
            leader.sendall(data)


def serve_rpc() -> None:
    parser = argparse.ArgumentParser("ggml-rpc-server")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    options = parser.parse_args()
    with socket.create_server((options.host, options.port)) as listener:
        print("Starting RPC server", flush=True)
        while True:
            answer(listener.accept()[0])


def serve(options: argparse.Namespace, members: list[socket.socket]) -> None:
    turn = threading.Lock()

    def step() -> str:
        """One token, which every member computes a part of."""
        with turn:
            for member in members:
                member.sendall(b"x")
            for number, member in enumerate(members, 1):
                if member.recv(1) != b"x":
                    lost(number)
        return "word "

    def lost(rank: int) -> None:
        print(f"rank {rank} is gone", flush=True)
        os._exit(1)

    def watch() -> None:
        while True:
            with turn:
                ready, _, _ = select.select(members, [], [], 0)
                for member in ready:
                    if not member.recv(1, socket.MSG_PEEK):
                        lost(members.index(member) + 1)
            time.sleep(0.1)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.reply({"status": "ok"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or b"{}")
            if self.path.startswith(("/sleep", "/wake_up")):
                Path(os.environ["STAND_IN_STATE"]).write_text(self.path)
                self.reply({})
                return
            text = "".join(step() for _ in range(int(body.get("max_tokens") or 4)))
            usage = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
            message = {"role": "assistant", "content": text}
            choice = {"index": 0, "message": message, "text": text, "finish_reason": "stop"}
            model = body.get("model", "")
            self.reply({"id": "1", "object": "chat.completion", "model": model, "choices": [choice], "usage": usage})

        def reply(self, value: object) -> None:
            content = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    for member in members:
        member.settimeout(None)
    step()
    if members:
        threading.Thread(target=watch, daemon=True).start()
    ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
