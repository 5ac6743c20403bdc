"""Fields of requests that only the server of their model understands, as far as they are read here."""

from __future__ import annotations

from cortex.wire.fields.tables.table import FieldTable, honoured

FIELDS = FieldTable((honoured("model", "other"),))
