"""Fields that are read here of requests that only the server of their model understands."""

from __future__ import annotations

from cortex.wire.fields.tables.table import FieldTable, content, in_envelope

FIELDS = FieldTable(
    (
        in_envelope("model", "other"),
        in_envelope("n", 2, "pictures; each is charged"),
        *(content(name, "other") for name in ("input", "prompt", "negative_prompt", "instructions", "text")),
    ),
    relayed=(
        *("audio", "chunking_strategy", "file", "hotwords", "include[]", "known_speaker_names[]"),
        *("known_speaker_references[]", "language", "response_format", "task", "temperature", "threshold"),
        *("timestamp_granularities", "timestamp_granularities[]", "to_language", "vad_filter"),
        *("lang", "lang_code", "ref_audio", "ref_text", "sample_rate", "speaker", "speed", "stream", "stream_format"),
        *("voice", "volume", "frequency_penalty", "max_completion_tokens", "max_new_tokens", "max_tokens", "min_p"),
        *("presence_penalty", "repetition_penalty", "seed", "top_k", "top_p"),
        *("background", "cfg_scale", "clip_skip", "guidance_scale", "height", "image", "image[]", "input_fidelity"),
        *("mask", "moderation", "num_inference_steps", "output_compression", "output_format", "partial_images"),
        *("quality", "sampler", "sampling_method", "scheduler", "size", "steps", "strength", "style", "width", "user"),
    ),
    opens_paths=True,
)
