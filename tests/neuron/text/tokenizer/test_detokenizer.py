from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from cortex.neuron.text.tokenizer.detokenizer import Detokenizer
from cortex.wire.requests import GenerateRequest, Tool

from ..conftest import known_id


@given(data=st.data())
def test_pushes_and_flush_join_to_the_whole_text_for_every_split(make_model: Any, data: st.DataObject) -> None:
    tokenizer = make_model("chatml").tokenizer
    text_ids = st.text().map(tokenizer.encode)
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size + 3))  # broken characters and unknown ids included
    ids = data.draw(st.one_of(text_ids, any_ids))
    detokenizer = Detokenizer(tokenizer)
    pieces, position = [], 0
    while position < len(ids):
        size = data.draw(st.integers(1, 4))
        pieces.append(detokenizer.push(ids[position : position + size]))
        position += size
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(ids)


def test_character_is_emitted_whole(make_model: Any) -> None:
    tokenizer = make_model("chatml").tokenizer
    ids = [known_id(tokenizer, bytes([byte])) for byte in "😀".encode()]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push([i]) for i in ids] == ["", "", "", "😀"]
    assert detokenizer.flush() == ""


def test_incomplete_character_is_replaced_at_the_end(make_model: Any) -> None:
    tokenizer = make_model("chatml").tokenizer
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push([known_id(tokenizer, b"\xf0"), known_id(tokenizer, b"\x9f")]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_control_tokens_are_hidden_except_markers_that_the_parser_reads(make_model: Any) -> None:
    model = make_model("qwen3")
    ids = model.encode("<think>hm</think>a<|im_end|><tool_call>")
    assert (
        model.detokenizer(GenerateRequest(model="m", tools=(Tool(name="f", parameters={}),))).push(ids)
        == "<think>hm</think>a<tool_call>"
    )
    assert model.decode(ids) == "<think>hm</think>a<|im_end|><tool_call>"
