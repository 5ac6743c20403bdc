"""The OpenAI responses dialect, without state: every request has its whole conversation. A gateway adds state."""

from cortex.wire.dialects.openai_responses.fields import FIELDS
from cortex.wire.dialects.openai_responses.items import pictures
from cortex.wire.dialects.openai_responses.request import parse, read_facts, read_state
from cortex.wire.dialects.openai_responses.stream import Encoder, fold, stream_error
from cortex.wire.errors import Family
from cortex.wire.sse import COMMENT as KEEPALIVE
from cortex.wire.sse import CONTENT_TYPE

PATH = "/v1/responses"
CONVERSATION = ("instructions", "input")
PICTURE_MARKS = (b";base64,", b";BASE64,")
CLIENT_FIELDS: dict[str, str] = {"messages": "input"}
FAMILY = Family.OPENAI
ID_PREFIX = "resp_"

__all__ = [
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
    "read_state",
    "stream_error",
]
