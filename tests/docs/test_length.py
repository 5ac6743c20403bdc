"""The documentation stays short enough to be read: a limit on all of its words, and on those of a paragraph."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
GENERATED = {ROOT / "docs" / name for name in ("configuration.md", "fields.md", "models.md")}
"""`make docs` writes them; their tables are references, not text that is read from top to bottom."""

MAX_WORDS = 30_000
MAX_PARAGRAPH_WORDS = 120
ITEM = re.compile(r"^\s*(?:[-*]|\d+\.) ")


def prose(text: str, has_tables: bool) -> list[str]:
    """The paragraphs, list items, headings and, with `has_tables`, rows of tables. Code blocks are left out."""
    found: list[list[str]] = [[]]
    in_code = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif in_code:
            continue
        elif line.startswith("|"):
            found += [[line], []] if has_tables else [[]]
        elif not line.strip():
            found.append([])
        elif ITEM.match(line):
            found.append([line])
        else:
            found[-1].append(line)
    return [" ".join(lines) for lines in found if lines]


def num_words(text: str) -> int:
    return sum(any(character.isalnum() for character in word) for word in text.split())


def test_all_pages_together_are_short() -> None:
    words = {page: sum(map(num_words, prose(page.read_text(), page not in GENERATED))) for page in PAGES}
    assert sum(words.values()) <= MAX_WORDS, {str(page.relative_to(ROOT)): count for page, count in words.items()}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paragraphs_are_short(page: Path) -> None:
    paragraphs = [each for each in prose(page.read_text(), has_tables=False) if num_words(each) > MAX_PARAGRAPH_WORDS]
    assert [f"{num_words(each)} words: {each[:80]}" for each in paragraphs] == []


def test_counts_what_a_reader_reads() -> None:
    text = "# Title\n\nTwo\nwords\n- an item\n  of five words\n\n```sh\nnot this\n```\n| a | b |\n|---|---|\n"
    assert [num_words(each) for each in prose(text, has_tables=True)] == [1, 2, 5, 2, 0]
    assert [num_words(each) for each in prose(text, has_tables=False)] == [1, 2, 5]
