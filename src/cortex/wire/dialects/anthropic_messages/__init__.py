"""The Anthropic messages dialect."""

from cortex.wire.dialects.anthropic_messages.billing import BILLED, strip_billing_header
from cortex.wire.dialects.anthropic_messages.request import parse
from cortex.wire.dialects.anthropic_messages.stream import Encoder, fold, stream_error
from cortex.wire.errors import Family
from cortex.wire.sse import CONTENT_TYPE, frame

FAMILY = Family.ANTHROPIC
ID_PREFIX = "msg_"
KEEPALIVE = frame(b'{"type":"ping"}', "ping")

__all__ = [
    "BILLED",
    "CONTENT_TYPE",
    "FAMILY",
    "ID_PREFIX",
    "KEEPALIVE",
    "Encoder",
    "fold",
    "parse",
    "stream_error",
    "strip_billing_header",
]
