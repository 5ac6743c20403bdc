"""The Anthropic messages dialect."""

from cortex.wire.dialects.anthropic_messages.billing import BILLED as BILLED
from cortex.wire.dialects.anthropic_messages.billing import strip_billing_header as strip_billing_header
from cortex.wire.dialects.anthropic_messages.fields import FIELDS as FIELDS
from cortex.wire.dialects.anthropic_messages.request import parse as parse
from cortex.wire.dialects.anthropic_messages.request import pictures as pictures
from cortex.wire.dialects.anthropic_messages.request import read_facts as read_facts
from cortex.wire.dialects.anthropic_messages.stream import Encoder as Encoder
from cortex.wire.dialects.anthropic_messages.stream import fold as fold
from cortex.wire.dialects.anthropic_messages.stream import stream_error as stream_error
from cortex.wire.errors import Family
from cortex.wire.sse import CONTENT_TYPE as CONTENT_TYPE
from cortex.wire.sse import frame

PATH = "/v1/messages"
CONVERSATION = ("system", "messages")
PICTURE_MARKS = (b'"base64"',)
CLIENT_FIELDS: dict[str, str] = {}
FAMILY = Family.ANTHROPIC
ID_PREFIX = "msg_"
KEEPALIVE = frame(b'{"type":"ping"}', "ping")
