"""Fields of `POST /v1/completions`."""

from __future__ import annotations

from cortex.wire.fields.tables.shared import ACCOUNT, EXTENSIONS, OUTPUT, PROMPT, SAMPLING, STREAM
from cortex.wire.fields.tables.table import FieldTable, content, honoured, in_envelope, limit, rejected

FIELDS = FieldTable(
    (
        in_envelope("model", "other"),
        content("prompt", "other", "a string, token ids, or a list of either"),
        honoured("echo", True),
        limit(
            "max_tokens",
            9,
            "of completions: absent, they end with the text or the context (16 tokens in OpenAI's API); "
            "0: no tokens, with `echo` the prompt alone; -1 is no limit, as in llama.cpp",
        ),
        limit("n_predict", 9, "llama.cpp's name for `max_tokens`; -1 is no limit, 0 computes the prompt alone"),
        in_envelope("n", 2),
        honoured("logprobs", 2, "with `echo` also of the prompt"),
        honoured("prompt_logprobs", 1, "vLLM; not in a stream"),
        honoured("return_token_ids", True, "vLLM: `token_ids` of choices, and `prompt_token_ids`"),
        honoured("response_format", {"type": "json_object"}),
        honoured("user", "u"),
        honoured("suffix", "x", "fills in before it; for models with the capability `insert`"),
        rejected("best_of", 3, "ranking of candidates is not supported; request several with 'n'", 1),
        rejected("add_special_tokens", False, "send the prompt as token ids to leave them out", True),
        rejected("prompt_embeds", "x", "a prompt is text or token ids"),
    ),
    STREAM,
    SAMPLING,
    OUTPUT,
    PROMPT,
    ACCOUNT,
    EXTENSIONS,
)
