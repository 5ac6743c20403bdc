"""Fields of requests that only the server of their model understands, as far as they are read here."""

from __future__ import annotations

from cortex.wire.fields.tables.table import FieldTable, content, in_envelope

FIELDS = FieldTable(
    (
        in_envelope("model", "other"),
        *(content(name, "other") for name in ("input", "prompt", "negative_prompt", "instructions", "text")),
    )
)
