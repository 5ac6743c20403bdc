"""The OpenAI responses dialect, without state: every request has its whole conversation. A gateway adds state."""

from cortex.wire.dialects.openai_responses.request import parse
from cortex.wire.dialects.openai_responses.stream import Encoder, fold, stream_error
from cortex.wire.errors import Family
from cortex.wire.sse import COMMENT as KEEPALIVE
from cortex.wire.sse import CONTENT_TYPE

FAMILY = Family.OPENAI
ID_PREFIX = "resp_"

__all__ = ["CONTENT_TYPE", "FAMILY", "ID_PREFIX", "KEEPALIVE", "Encoder", "fold", "parse", "stream_error"]
