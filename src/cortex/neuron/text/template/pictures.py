"""Pictures in conversations: the parts that templates get for them, and the tokens that take their place.

A template writes one placeholder for a picture. Tokenised, it becomes as many tokens as the picture has positions. Text
of clients never becomes a placeholder: it is literal (`literal_content.py`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final

from cortex.neuron.pictures.picture import PictureGrid, PicturePlace
from cortex.neuron.pictures.spec import PictureSpec, PictureText, UnusablePicture
from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.neuron.text.tokenizer.tokenizer import Tokenizer
from cortex.wire.errors import InvalidValue, TemplateRenderFailed
from cortex.wire.requests import GenerateRequest, PicturePart, Text, ToolResult

_NUMBER: Final = "picture"
"""The key of a picture's number in its part; templates ignore it."""

Turn = dict[str, Any]


def pictures_in(request: GenerateRequest) -> Iterator[PicturePart]:
    """The pictures of a conversation, in its order."""
    for message in request.messages:
        for part in message.parts:
            parts: Iterable[Any] = part.parts if isinstance(part, ToolResult) else (part,)
            yield from (each for each in parts if isinstance(each, PicturePart))


def picture_grids(request: GenerateRequest, spec: PictureSpec | None) -> dict[int, PictureGrid]:
    """The size in the prompt of each picture, by its number. Raises InvalidValue."""
    grids: dict[int, PictureGrid] = {}
    if spec is None:
        return grids
    for picture in pictures_in(request):
        try:
            grids[picture.number] = spec.grid(picture.width, picture.height, picture.detail)
        except UnusablePicture as error:
            raise InvalidValue(f"The picture cannot be used: {error}.", param=picture.param or "messages") from error
    return grids


def content_of(parts: Iterable[Text | PicturePart]) -> list[dict[str, Any]]:
    """The content of a turn with pictures, as templates expect it."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, PicturePart):
            content.append({"type": "image", _NUMBER: part.number})
        elif content and content[-1]["type"] == "text":
            content[-1]["text"] += f"\n{part.text}"
        else:
            content.append({"type": "text", "text": part.text})
    return content


def with_shown_pictures(turns: list[Turn], template: ChatTemplate, text: PictureText) -> list[Turn]:
    """The turns with pictures where the template shows them. If it shows none in tool results, these move to a user
    turn after the results."""
    has_pictures = any(turn["role"] == "tool" and isinstance(turn["content"], list) for turn in turns)
    if not has_pictures or (template.takes_tools and _shows_results(template, text.placeholder)):
        return turns
    moved: list[Turn] = []
    waiting: list[dict[str, Any]] = []
    for turn in (*turns, None):
        is_result = turn is not None and turn["role"] == "tool"
        if waiting and not is_result:
            if turn is not None and turn["role"] == "user":
                turn = {**turn, "content": [*waiting, *as_list(turn["content"])]}
            else:
                moved.append({"role": "user", "content": waiting})
            waiting = []
        if turn is None:
            break
        if is_result and isinstance(turn["content"], list):
            texts = [part["text"] for part in turn["content"] if part["type"] == "text"]
            waiting += [part for part in turn["content"] if part["type"] == "image"]
            turn = {**turn, "content": "\n".join(texts) or "(an image, which follows)"}
        moved.append(turn)
    return moved


def as_list(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A turn's content as parts."""
    return content if isinstance(content, list) else [{"type": "text", "text": content}]


def numbers_in(turns: Iterable[Turn]) -> list[int]:
    """The numbers of the pictures in the turns, in their order."""
    lists = (turn["content"] for turn in turns if isinstance(turn.get("content"), list))
    return [part[_NUMBER] for content in lists for part in content if part["type"] == "image"]


def placeholders(text: str, picture: PictureText, literal_at: Sequence[int], count: int) -> list[int]:
    """Where the template wrote placeholders. Raises TemplateRenderFailed unless there are `count` of them."""
    literal, found, start = frozenset(literal_at), [], text.find(picture.placeholder)
    while start >= 0:
        if start not in literal:
            found.append(start)
        start = text.find(picture.placeholder, start + 1)
    if len(found) != count:
        raise TemplateRenderFailed(
            f"the model's chat template shows {len(found)} of the conversation's {count} pictures; "
            "send pictures in messages of the user"
        )
    return found


class PlaceholderExpansion:
    """A text with the texts around each picture written out, and one token of the picture itself."""

    def __init__(self, text: str, picture: PictureText, at: Sequence[int]) -> None:
        self._at = at
        written = f"{picture.before}{picture.feature}{picture.after}"
        width = len(picture.placeholder)
        self._added = len(written) - width
        bounds = [0, *(end for start in at for end in (start, start + width)), len(text)]
        pieces = [text[first:end] for first, end in pairwise(bounds)]
        pieces[1::2] = [written] * len(at)
        self.text = "".join(pieces)

    def moved(self, position: int) -> int:
        """The new place of a character of the original text."""
        return position + self._added * bisect_left(self._at, position)


def expanded(
    ids: Sequence[int],
    numbers: Sequence[int],
    grids: Mapping[int, PictureGrid],
    text: PictureText,
    tokenizer: Tokenizer,
) -> tuple[tuple[int, ...], tuple[PicturePlace, ...]]:
    """The ids with all positions of each picture in place of its one token. Raises TemplateRenderFailed."""
    feature, row_end, end = (tokenizer.whole_id(each) for each in (text.feature, text.row_end, text.end))
    found = [at for at, token in enumerate(ids) if token == feature]
    if feature is None or len(found) != len(numbers):
        raise TemplateRenderFailed(f"{len(found)} places for {len(numbers)} pictures are in the prompt")
    every: list[int] = []
    places: list[PicturePlace] = []
    previous = 0
    for at, number in zip(found, numbers, strict=True):
        every += ids[previous:at]
        grid = grids[number]
        places.append(PicturePlace(number, len(every), grid))
        row = [feature] * grid.columns
        for index in range(grid.rows):
            every += row
            mark = end if index == grid.rows - 1 else row_end
            if text.row_end and mark is not None:
                every.append(mark)
        previous = at + 1
    every += ids[previous:]
    return tuple(every), tuple(places)


def moved_token(position: int, places: Iterable[PicturePlace]) -> int:
    """The place of a position after the pictures are written out."""
    for place in places:
        if place.at >= position:
            break
        position += place.grid.num_tokens - 1
    return position


@lru_cache(maxsize=64)
def _shows_results(template: ChatTemplate, placeholder: str) -> bool:
    """Whether the template shows a picture in a tool's result."""
    call = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}
    turns = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "call00000",
            "name": "look",
            "content": content_of([PicturePart(), Text(text="y")]),
        },
    ]
    try:
        return placeholder in template.render({"messages": turns, "tools": None, "add_generation_prompt": True})
    except TemplateRenderFailed:
        return False
