"""A response in the terminal: notice, reasoning, Markdown."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from cortex.cli.commands.chat import ResponseView, complete_blocks


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("", ""),
        ("one line", ""),
        ("a paragraph\n", ""),
        ("a paragraph\n\nanother", "a paragraph\n\n"),
        ("```py\na\n\nb", ""),
        ("```py\na\n\nb\n```\n\nafter", "```py\na\n\nb\n```\n\n"),
    ],
)
def test_block_is_complete_after_a_blank_line_outside_of_code(text: str, complete: str) -> None:
    assert complete_blocks(text) == (complete, text.removeprefix(complete))


def shown(*deltas: tuple[str, bool], is_terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=is_terminal, width=60, highlight=False, color_system=None)
    with ResponseView(console, "loading tiny") as view:
        for text, is_reasoning in deltas:
            view.show(text, is_reasoning=is_reasoning)
    return out.getvalue()


def test_terminal_shows_the_notice_and_renders_markdown() -> None:
    text = shown(("hmm", True), ("Some **bold** te", False), ("xt\n\n- it", False), ("em\n", False), is_terminal=True)
    assert "loading tiny" in text
    assert "Some bold text" in text
    assert " • item" in text
    assert text.index("hmm") < text.index("Some bold text")


def test_pipe_gets_the_text_as_it_is() -> None:
    assert shown(("Some **bold** te", False), ("xt", False), is_terminal=False) == "Some **bold** text\n"
