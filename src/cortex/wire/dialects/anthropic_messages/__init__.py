"""The Anthropic messages dialect."""

from functools import partial

from cortex.wire.dialects.anthropic_messages.billing import BILLED as BILLED
from cortex.wire.dialects.anthropic_messages.billing import strip_billing_header as strip_billing_header
from cortex.wire.dialects.anthropic_messages.errors import ANTHROPIC
from cortex.wire.dialects.anthropic_messages.fields import FIELDS, PRESET
from cortex.wire.dialects.anthropic_messages.request import parse as parse
from cortex.wire.dialects.anthropic_messages.request import pictures, read_summary
from cortex.wire.dialects.anthropic_messages.stream import Encoder as Encoder
from cortex.wire.dialects.anthropic_messages.stream import fold as fold
from cortex.wire.dialects.anthropic_messages.stream import stream_error
from cortex.wire.dialects.dialect import Dialect
from cortex.wire.sse import frame

DIALECT = Dialect(
    name="anthropic_messages",
    path="/v1/messages",
    fields=FIELDS,
    conversation=("system", "messages"),
    read_summary=read_summary,
    parse=parse,
    new_encoder=Encoder,
    fold=fold,
    stream_error=stream_error,
    id_prefix="msg_",
    family=ANTHROPIC,
    keepalive=frame(b'{"type":"ping"}', "ping"),
    preset=PRESET,
    picture_marks=(b'"base64"',),
    pictures=pictures,
    parse_counted=partial(parse, generates=False),
)
