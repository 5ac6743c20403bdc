"""The OpenAI responses dialect, without state: every request has its whole conversation. A gateway adds state."""

from cortex.wire.dialects.dialect import Dialect
from cortex.wire.dialects.openai_responses.fields import FIELDS, PRESET
from cortex.wire.dialects.openai_responses.items import pictures
from cortex.wire.dialects.openai_responses.request import parse as parse
from cortex.wire.dialects.openai_responses.request import read_state, read_summary
from cortex.wire.dialects.openai_responses.stream import Encoder as Encoder
from cortex.wire.dialects.openai_responses.stream import fold as fold
from cortex.wire.dialects.openai_responses.stream import stream_error

DIALECT = Dialect(
    name="openai_responses",
    path="/v1/responses",
    fields=FIELDS,
    conversation=("instructions", "input"),
    read_summary=read_summary,
    parse=parse,
    new_encoder=Encoder,
    fold=fold,
    stream_error=stream_error,
    id_prefix="resp_",
    client_fields={"messages": "input"},
    preset=PRESET,
    picture_marks=(b";base64,", b";BASE64,"),
    pictures=pictures,
    read_counted_summary=read_state,
)
