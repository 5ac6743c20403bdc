"""The OpenAI chat-completions dialect, for clients and for other servers behind the gateway."""

from cortex.wire.dialects.dialect import Dialect
from cortex.wire.dialects.openai_chat.fields import FIELDS, PRESET
from cortex.wire.dialects.openai_chat.request import parse as parse
from cortex.wire.dialects.openai_chat.request import pictures, read_counted_summary, read_summary
from cortex.wire.dialects.openai_chat.stream import Encoder as Encoder
from cortex.wire.dialects.openai_chat.stream import fold as fold
from cortex.wire.dialects.openai_chat.stream import loading_chunk
from cortex.wire.dialects.openai_chat.upstream_request import build as build
from cortex.wire.dialects.openai_chat.upstream_response import ResponseDecoder as ResponseDecoder
from cortex.wire.dialects.openai_chat.upstream_response import unfold as unfold
from cortex.wire.dialects.openai_chunks import stream_error

DIALECT = Dialect(
    name="openai_chat",
    path="/v1/chat/completions",
    fields=FIELDS,
    conversation=("messages",),
    read_summary=read_summary,
    parse=parse,
    new_encoder=Encoder,
    fold=fold,
    stream_error=stream_error,
    id_prefix="chatcmpl-",
    spoken_by="servers",
    preset=PRESET,
    picture_marks=(b";base64,", b";BASE64,"),
    pictures=pictures,
    read_counted_summary=read_counted_summary,
    loading_chunk=loading_chunk,
)
