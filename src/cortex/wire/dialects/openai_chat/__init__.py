"""The OpenAI chat-completions dialect, for clients and for other servers behind the gateway."""

from cortex.wire.dialects.openai_chat.fields import FIELDS
from cortex.wire.dialects.openai_chat.request import parse, pictures, read_facts
from cortex.wire.dialects.openai_chat.stream import Encoder, fold
from cortex.wire.dialects.openai_chat.upstream_request import build
from cortex.wire.dialects.openai_chat.upstream_response import ResponseDecoder, unfold
from cortex.wire.dialects.openai_chunks import stream_error
from cortex.wire.errors import Family
from cortex.wire.sse import COMMENT as KEEPALIVE
from cortex.wire.sse import CONTENT_TYPE

PATH = "/v1/chat/completions"
CONVERSATION = ("messages",)
PICTURE_MARKS = (b";base64,", b";BASE64,")
CLIENT_FIELDS: dict[str, str] = {}
FAMILY = Family.OPENAI
ID_PREFIX = "chatcmpl-"

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
    "ResponseDecoder",
    "build",
    "fold",
    "parse",
    "pictures",
    "read_facts",
    "stream_error",
    "unfold",
]
