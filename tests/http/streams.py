"""A request to a relay, and the parts of a node's stream."""

from __future__ import annotations

POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAccept-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)
