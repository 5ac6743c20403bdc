"""Fields that several OpenAI dialects share, with those that vLLM, llama.cpp and SGLang add to them."""

from __future__ import annotations

from cortex.wire.fields.tables.table import honoured, in_envelope, rejected, tolerated

_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}

CACHE_SALT = in_envelope("cache_salt", "s", "shares cached prefixes only with requests that have the same salt")
TIER = in_envelope(
    "service_tier", "flex", "`flex` waits for others, `priority` goes first; the response names the class used"
)
PRIORITY = in_envelope("priority", 1, "as vLLM: below 0 as `service_tier` `priority`, above 0 as `flex`")
SPECULATION = honoured("speculation", "off", "one token per step; the response is the same")
SAMPLING = (
    honoured("temperature", 0.5, "at most 2; in messages 1, in `/api` and `/infill` 100"),
    honoured("top_p", 0.5),
    honoured("top_k", 5, "-1 and 0 keep all"),
    honoured("min_p", 0.1),
    honoured("presence_penalty", 0.5, "between -2 and 2; in `/api` and `/infill` -100 and 100"),
    honoured("frequency_penalty", 0.5, "between -2 and 2; in `/api` and `/infill` -100 and 100"),
    honoured("repetition_penalty", 1.1),
    honoured("repeat_penalty", 1.1, "llama.cpp's name for `repetition_penalty`"),
    honoured("repetition_window", 64, "latest tokens that `repetition_penalty` applies to"),
    honoured("repeat_last_n", 64, "llama.cpp's name for `repetition_window`; -1 is all tokens"),
    honoured("logit_bias", {"7": 5}),
    honoured("allowed_token_ids", [3, 5]),
    honoured("seed", 7),
    honoured("min_tokens", 3),
    honoured("ignore_eos", True),
    honoured("stop", ["END"]),
    honoured("stop_token_ids", [2]),
    honoured(
        "samplers",
        ["top_k", "temperature"],
        "llama.cpp: those that it leaves out do not apply; their order is fixed",
        top_p=0.5,
    ),
    SPECULATION,
)
"""For `read_sampling`."""

OUTPUT = (
    honoured("structured_outputs", {"choice": ["a", "b"]}, "`json`, `json_object`, `regex`, `grammar` or `choice`"),
    honoured("guided_json", _SCHEMA),
    honoured("guided_json_object", True),
    honoured("guided_regex", "[0-9]+"),
    honoured("guided_grammar", 'root ::= "a"', "Lark or GBNF"),
    honoured("guided_choice", ["a", "b"]),
    honoured("json_schema", _SCHEMA, "llama.cpp and SGLang"),
    honoured("regex", "[0-9]+", "SGLang"),
    honoured("grammar", 'root ::= "a"', "llama.cpp: GBNF or Lark"),
    honoured("ebnf", 'root ::= "a"', "SGLang: GBNF or Lark"),
)
"""For `read_output_format`: constraints on the output. A request may have one."""

TIMINGS = honoured("timings_per_token", True, "llama.cpp: `timings` in the response, and in every chunk of a stream")
STREAM = (
    TIMINGS,
    in_envelope("stream", True),
    honoured("stream_options.include_usage", True, "only with `stream`", stream=True),
    honoured("stream_options.continuous_usage_stats", True, "usage in every chunk", stream=True),
    tolerated("stream_options.include_obfuscation", False, "nothing is obfuscated", stream=True),
)

ACCOUNT = (
    tolerated("store", True, "nothing is stored"),
    tolerated("metadata", {"k": "v"}),
    TIER,
    tolerated("safety_identifier", "s"),
    tolerated("prompt_cache_key", "k", "prefixes are always cached"),
    tolerated("prompt_cache_retention", "24h"),
)

PROMPT = (honoured("truncate_prompt_tokens", 8, "keeps the last tokens of the prompt; -1: as many as fit"),)

EXTENSIONS = (
    CACHE_SALT,
    PRIORITY,
    tolerated("request_id", "r", "the header `x-request-id` names a request"),
    tolerated("rid", "r"),
    tolerated("cache_prompt", True, "prefixes are always cached"),
    tolerated("id_slot", -1),
    tolerated("spaces_between_special_tokens", True),
    tolerated("sse_ping_interval", 1, "the server's setting `keepalive_s` has the interval"),
    tolerated("reasoning_control", True),
    tolerated("return_progress", True),
    rejected("use_beam_search", True, "beam search is not supported; sample with 'n'", False),
    rejected("length_penalty", 1.5, "beam search is not supported; remove it", 1),
    rejected("early_stopping", True, "beam search is not supported; remove it", False),
    rejected("bad_words", ["x"], "forbidden words are not supported; use 'logit_bias' with token ids", []),
    rejected("logits_processors", ["x"], "the engine runs no code of requests; remove it", []),
    rejected("custom_logit_processor", "x", "the engine runs no code of requests; remove it", ""),
    rejected("typical_p", 0.5, "typical sampling is not supported; use 'top_p' or 'min_p'", 1),
    rejected("tfs_z", 0.5, "tail-free sampling is not supported; use 'top_p' or 'min_p'", 1),
    rejected("top_a", 0.5, "top-a sampling is not supported; use 'min_p'", 0),
    rejected("top_n_sigma", 1.0, "top-n-sigma sampling is not supported; use 'min_p'", -1, 0),
    rejected("dynatemp_range", 0.5, "a dynamic temperature is not supported; use 'temperature'", 0),
    rejected("mirostat", 1, "mirostat is not supported; use 'temperature' and 'top_p'", 0),
    rejected("dry_multiplier", 0.8, "the DRY penalty is not supported; use 'repetition_penalty'", 0),
    rejected("xtc_probability", 0.5, "XTC sampling is not supported; remove it", 0),
    rejected("skip_special_tokens", False, "control tokens are never part of the text; remove it", True),
    rejected("include_stop_str_in_output", True, "the stop string is reported as 'stop_reason'; remove it", False),
    rejected("return_tokens_as_token_ids", True, "tokens are returned as text; remove it", False),
    rejected("return_hidden_states", True, "hidden states are not returned; remove it", False),
    rejected("kv_transfer_params", {"a": 1}, "the cache is not transferred between servers; remove it", {}),
    rejected("lora", [{"id": 0}], "adapters are not supported; name a model that has it merged", []),
    rejected("lora_path", "x", "adapters are not supported; name a model that has it merged", ""),
    rejected("vllm_xargs", {"a": 1}, "there are no arguments for extensions here; remove it", {}),
    rejected("stop_regex", "x", "stop expressions are not supported; use 'stop'", "", []),
)
