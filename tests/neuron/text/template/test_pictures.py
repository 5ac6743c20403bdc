"""Pictures in prompts: where they stand, and what never becomes one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.neuron.text.conftest import load_text, write_model
from tokenizers import AddedToken, Tokenizer

from cortex.neuron.families.registry import BY_TYPE
from cortex.neuron.pictures.spec import PictureText
from cortex.neuron.text.model import TextModel
from cortex.neuron.text.preparation import prepare
from cortex.neuron.text.template.prompt import PromptRules
from cortex.wire.errors import ContextLengthExceeded, InvalidValue, TemplateRenderFailed, UnsupportedModality
from cortex.wire.requests import GenerateRequest, Message, Part, PicturePart, Text, ToolCall, ToolResult

TEMPLATE = (
    "{%- macro show(content) %}{% if content is string %}{{ content }}{% else %}{% for part in content %}"
    "{% if part.type == 'image' %}MARK{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endmacro -%}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}{% endfor %}"
    "{% if message.role == 'tool' %}TOOL{% else %}{{ show(message.content) }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if tools %}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen3_5": {"size": {"shortest_edge": 1024, "longest_edge": 1 << 20}},
    "gemma3": {"size": {"height": 112, "width": 112}},
    "mistral3": {"size": {"longest_edge": 112}},
}


def text_of(family: str) -> PictureText:
    defaults = BY_TYPE[family].pictures
    assert defaults is not None
    return defaults.text


def model_of(directory: Path, backend: Tokenizer, family: str, tool: str = "{{ show(message.content) }}") -> TextModel:
    text, processor = text_of(family), PROCESSORS[family]
    with_tokens = Tokenizer.from_str(backend.to_str())
    tokens = {*text.tokens, "<end_of_image>"}
    with_tokens.add_special_tokens([AddedToken(each, normalized=False, special=True) for each in sorted(tokens)])
    mark = f"<{text.placeholder}>" if family == "qwen3_5" else text.placeholder
    vision = {"image_size": 112}
    config = {"model_type": family, "vision_config": vision, "mm_tokens_per_image": 4}
    path = write_model(directory, with_tokens, None, config=config, preprocessor_config=processor)
    (path / "chat_template.jinja").write_text(TEMPLATE.replace("MARK", mark).replace("TOOL", tool))
    return load_text(path)


def picture(number: int, width: int = 64, height: int = 96, detail: Any = "auto") -> PicturePart:
    return PicturePart(number=number, width=width, height=height, detail=detail, param=f"messages[{number}]")


def ask(*turns: tuple[Part, ...] | Message, **fields: Any) -> GenerateRequest:
    messages = tuple(turn if isinstance(turn, Message) else Message(role="user", parts=turn) for turn in turns)
    return GenerateRequest(model="m", messages=messages, **fields)


@pytest.mark.parametrize("family", PROCESSORS)
def test_a_picture_takes_its_positions_between_the_text(tmp_path: Path, backend: Tokenizer, family: str) -> None:
    model = model_of(tmp_path, backend, family)
    request = ask((Text(text="look"), picture(1), Text(text="and"), picture(0, 96, 32)), (picture(2),))
    rendered = model.render(request)
    text, spec = text_of(family), model.pictures
    assert spec is not None
    assert [place.number for place in rendered.places] == [1, 0, 2]
    for place in rendered.places:
        image = [picture(0, 96, 32), picture(1), picture(2)][place.number]
        assert place.grid == spec.grid(image.width, image.height)
        inside = rendered.ids[place.at : place.at + place.grid.num_tokens]
        offsets = set(place.grid.feature_offsets())
        is_feature = [token == model.tokenizer.whole_id(text.feature) for token in inside]
        assert is_feature == [index in offsets for index in range(place.grid.num_tokens)]
    # The whole prompt is what tokenising the written text gives.
    written = rendered.text
    for place in rendered.places:
        first = text.feature if not text.row_end else text.placeholder
        whole = text.written(place.grid).removeprefix(text.before).removesuffix(text.after)
        written = written.replace(f"\0{first}", first).replace(first, whole.replace(text.feature, "\0"), 1)
    assert model.decode(rendered.ids) == written.replace("\0", text.feature)
    assert tuple(model.encode(written.replace("\0", text.feature))) == rendered.ids


def test_turn_ends_follow_the_pictures(tmp_path: Path, backend: Tokenizer) -> None:
    model = model_of(tmp_path, backend, "qwen3_5")
    first = (Text(text="look"), picture(0))
    answer = Message(role="assistant", parts=(Text(text="seen"),))
    earlier, later = model.render(ask(first)), model.render(ask(first, answer, (Text(text="again"), picture(1))))
    end = earlier.turn_ends[-1]
    assert end > earlier.places[0].at + earlier.places[0].grid.num_tokens
    assert later.ids[:end] == earlier.ids[:end]
    assert later.places[0] == earlier.places[0]


@pytest.mark.parametrize("as_control", [False, True])
def test_a_placeholder_in_text_is_only_text(tmp_path: Path, backend: Tokenizer, as_control: bool) -> None:
    rules = PromptRules(control_tokens_in_messages=as_control)
    for number, family in enumerate(PROCESSORS):
        directory = tmp_path / str(number)
        directory.mkdir()
        model = model_of(directory, backend, family)
        text = text_of(family)
        typed = "".join(sorted({text.placeholder, text.feature, text.row_end or "x"}))
        rendered = model.render(ask((Text(text=typed), picture(0), Text(text=typed))), rules)
        assert len(rendered.places) == 1
        assert rendered.ids.count(model.tokenizer.whole_id(text.feature) or -1) == rendered.places[0].grid.num_features
        [place] = rendered.places
        assert typed in model.decode(rendered.ids[: place.at])
        assert typed in model.decode(rendered.ids[place.at + place.grid.num_tokens :])


@pytest.mark.parametrize(
    ("tool", "expected"), [("{{ show(message.content) }}", "tool"), ("{{ message.content }}", "user")]
)
def test_a_picture_in_a_tools_result_is_shown_there_or_after_it(
    tmp_path: Path, backend: Tokenizer, tool: str, expected: str
) -> None:
    model = model_of(tmp_path, backend, "qwen3_5", tool)
    calls = tuple(ToolCall(id=f"c{number}", name="look", arguments="{}") for number in range(2))
    results = [
        Message(role="tool", parts=(ToolResult(call_id="c0", parts=(Text(text="here"), picture(0))),)),
        Message(role="tool", parts=(ToolResult(call_id="c1", parts=(picture(1),)),)),
    ]
    rendered = model.render(ask((Text(text="x"),), Message(role="assistant", parts=calls), *results))
    assert [place.number for place in rendered.places] == [0, 1]
    before = model.decode(rendered.ids[: rendered.places[0].at])
    assert before.rsplit("<|im_start|>", 1)[1].startswith(expected)


def test_rejects_pictures_that_have_no_place(tmp_path: Path, backend: Tokenizer, make_model: Any) -> None:
    model = model_of(tmp_path, backend, "qwen3_5")
    with pytest.raises(UnsupportedModality, match="reads text only"):
        make_model("qwen3").render(ask((picture(0),)))
    with pytest.raises(InvalidValue, match="1 × 500 pixels") as found:
        model.render(ask((picture(3, 1, 500),)))
    assert found.value.param == "messages[3]"
    with pytest.raises(InvalidValue, match="is a picture in a message of the system"):
        model.render(ask(Message(role="system", parts=(picture(0),)), (Text(text="x"),)))
    with pytest.raises(ContextLengthExceeded):
        model.render(ask((picture(0, 1024, 1024),)), PromptRules(context_tokens=1000))
    with pytest.raises(InvalidValue, match="truncate_prompt_tokens"):
        prepare(model, ask((picture(0),), truncate_prompt_tokens=3), PromptRules(context_tokens=1000))
    bare = model_of(tmp_path, backend, "qwen3_5")
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}{% endfor %}")
    bare = load_text(tmp_path)
    with pytest.raises(TemplateRenderFailed, match="shows 0 of the conversation's 1 pictures"):
        bare.render(ask((picture(0),)))


def test_truncation_drops_the_oldest_pictures_with_their_messages(tmp_path: Path, backend: Tokenizer) -> None:
    model = model_of(tmp_path, backend, "qwen3_5")
    answer = Message(role="assistant", parts=(Text(text="seen"),))
    request = ask((picture(0, 512, 512),), answer, (picture(1, 512, 512),), truncate=True)
    [prompt] = prepare(model, request, PromptRules(context_tokens=400)).prompts
    assert [place.number for place in prompt.places] == [1]


def test_capabilities_name_vision(tmp_path: Path, backend: Tokenizer) -> None:
    assert model_of(tmp_path, backend, "qwen3_5").capabilities.vision
