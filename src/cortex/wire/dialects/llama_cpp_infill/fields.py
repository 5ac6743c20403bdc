"""Fields of llama.cpp's `POST /infill`."""

from __future__ import annotations

from cortex.wire.fields.tables.shared import CACHE_SALT, SAMPLING
from cortex.wire.fields.tables.table import FieldTable, content, in_envelope, limit, tolerated

FIELDS = FieldTable(
    (
        in_envelope("model", "other"),
        content("input_prefix", "def f(", "the text before the gap"),
        content("input_suffix", "return x", "the text behind it"),
        content("prompt", "other", "the beginning of what is filled in"),
        content(
            "input_extra",
            [{"filename": "a.py", "text": "x = 1"}],
            "other files, before all else; with the tokens for repositories, if the model has them",
        ),
        limit("n_predict", 9, "-1 is no limit, 0 computes the prompt alone"),
        in_envelope("stream", True),
        CACHE_SALT,
        tolerated("cache_prompt", True, "prefixes are always cached"),
        tolerated("id_slot", -1),
        tolerated("n_indent", 0),
        tolerated("t_max_prompt_ms", 500, "a hint for speed"),
        tolerated("t_max_predict_ms", 500, "a hint for speed"),
        tolerated("response_fields", ["content"]),
    ),
    SAMPLING,
)
