"""Predicted outputs: text that a response is expected to repeat, as OpenAI's `prediction`."""

from __future__ import annotations

from cortex.wire.fields.body import Fields


def read_prediction(fields: Fields) -> str | None:
    """The text of `prediction`; None: there is none. Raises `InvalidValue`."""
    prediction = fields.object("prediction")
    if prediction is None:
        return None
    if prediction.text("type") not in ("content", None):
        raise prediction.invalid("type", "only `content` is known")
    if not isinstance(prediction.raw("content"), list):
        return prediction.required_text("content")
    parts = list(prediction.objects("content"))
    for part in parts:
        if part.text("type") not in ("text", None):
            raise part.invalid("type", "a prediction consists of parts of type `text`")
    return "".join(part.required_text("text") for part in parts)
