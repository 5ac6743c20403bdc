"""The OpenAI responses dialect, without state: every request has its whole conversation. A gateway adds state."""

from cortex.wire.dialects.openai_responses.fields import FIELDS as FIELDS
from cortex.wire.dialects.openai_responses.items import pictures as pictures
from cortex.wire.dialects.openai_responses.request import parse as parse
from cortex.wire.dialects.openai_responses.request import read_facts as read_facts
from cortex.wire.dialects.openai_responses.request import read_state as read_state
from cortex.wire.dialects.openai_responses.stream import Encoder as Encoder
from cortex.wire.dialects.openai_responses.stream import fold as fold
from cortex.wire.dialects.openai_responses.stream import stream_error as stream_error
from cortex.wire.errors import Family
from cortex.wire.sse import COMMENT
from cortex.wire.sse import CONTENT_TYPE as CONTENT_TYPE

PATH = "/v1/responses"
CONVERSATION = ("instructions", "input")
PICTURE_MARKS = (b";base64,", b";BASE64,")
CLIENT_FIELDS: dict[str, str] = {"messages": "input"}
FAMILY = Family.OPENAI
ID_PREFIX = "resp_"
KEEPALIVE = COMMENT
