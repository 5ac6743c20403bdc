"""The Anthropic messages dialect."""

from cortex.wire.dialects.anthropic_messages.billing import BILLED, strip_billing_header
from cortex.wire.dialects.anthropic_messages.fields import FIELDS
from cortex.wire.dialects.anthropic_messages.request import parse, pictures, read_facts
from cortex.wire.dialects.anthropic_messages.stream import Encoder, fold, stream_error
from cortex.wire.errors import Family
from cortex.wire.sse import CONTENT_TYPE, frame

PATH = "/v1/messages"
CONVERSATION = ("system", "messages")
PICTURE_MARKS = (b'"base64"',)
CLIENT_FIELDS: dict[str, str] = {}
FAMILY = Family.ANTHROPIC
ID_PREFIX = "msg_"
KEEPALIVE = frame(b'{"type":"ping"}', "ping")

__all__ = [
    "BILLED",
    "CLIENT_FIELDS",
    "CONTENT_TYPE",
    "CONVERSATION",
    "FAMILY",
    "FIELDS",
    "ID_PREFIX",
    "KEEPALIVE",
    "PATH",
    "PICTURE_MARKS",
    "Encoder",
    "fold",
    "parse",
    "pictures",
    "read_facts",
    "stream_error",
    "strip_billing_header",
]
