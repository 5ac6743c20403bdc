from __future__ import annotations

import msgspec
import pytest

from cortex.wire.packed_request import MAX_LOOP_TOKENS, pack, unpack
from cortex.wire.requests import GenerateRequest

TOKENS = GenerateRequest(model="m", prompt=(1, 2))


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (TOKENS, ((1, 2),)),
        (msgspec.structs.replace(TOKENS, more_prompts=((3,),)), ((1, 2), (3,))),
        (msgspec.structs.replace(TOKENS, more_prompts=("text",)), ()),
        (msgspec.structs.replace(TOKENS, prompt="text", more_prompts=((3,),)), ()),
        (msgspec.structs.replace(TOKENS, prompt=None), ()),
        (msgspec.structs.replace(TOKENS, prompt="text"), ()),
        (msgspec.structs.replace(TOKENS, truncate_prompt_tokens=1), ()),
        (msgspec.structs.replace(TOKENS, truncate=True), ()),
        (msgspec.structs.replace(TOKENS, prediction="text"), ()),
        (msgspec.structs.replace(TOKENS, prompt=(1,) * MAX_LOOP_TOKENS), ((1,) * MAX_LOOP_TOKENS,)),
        (msgspec.structs.replace(TOKENS, prompt=(1,) * (MAX_LOOP_TOKENS + 1)), ()),
    ],
)
def test_prompts_of_tokens_are_at_hand_where_nothing_else_is_to_be_read(
    request_: GenerateRequest, expected: tuple[tuple[int, ...], ...]
) -> None:
    packed = pack(request_)
    assert packed.token_prompts == expected
    assert unpack(packed.whole()) == request_
