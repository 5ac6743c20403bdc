"""The Anthropic messages dialect."""

from cortex.wire.anthropic_messages.request import parse, parse_count_tokens
from cortex.wire.anthropic_messages.stream import Encoder, fold, stream_error
from cortex.wire.errors import Family
from cortex.wire.sse import frame

FAMILY = Family.ANTHROPIC
ID_PREFIX = "msg_"
KEEPALIVE = frame(b'{"type":"ping"}', "ping")

__all__ = [
    "FAMILY",
    "ID_PREFIX",
    "KEEPALIVE",
    "Encoder",
    "fold",
    "parse",
    "parse_count_tokens",
    "stream_error",
]
