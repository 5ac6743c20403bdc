"""The OpenAI chat-completions dialect, for clients and for other servers behind the gateway."""

from cortex.wire.dialects.openai_chat.fields import FIELDS as FIELDS
from cortex.wire.dialects.openai_chat.request import parse as parse
from cortex.wire.dialects.openai_chat.request import pictures as pictures
from cortex.wire.dialects.openai_chat.request import read_facts as read_facts
from cortex.wire.dialects.openai_chat.stream import Encoder as Encoder
from cortex.wire.dialects.openai_chat.stream import fold as fold
from cortex.wire.dialects.openai_chat.upstream_request import build as build
from cortex.wire.dialects.openai_chat.upstream_response import ResponseDecoder as ResponseDecoder
from cortex.wire.dialects.openai_chat.upstream_response import unfold as unfold
from cortex.wire.dialects.openai_chunks import stream_error as stream_error
from cortex.wire.errors import Family
from cortex.wire.sse import COMMENT
from cortex.wire.sse import CONTENT_TYPE as CONTENT_TYPE

PATH = "/v1/chat/completions"
CONVERSATION = ("messages",)
PICTURE_MARKS = (b";base64,", b";BASE64,")
CLIENT_FIELDS: dict[str, str] = {}
FAMILY = Family.OPENAI
ID_PREFIX = "chatcmpl-"
KEEPALIVE = COMMENT
