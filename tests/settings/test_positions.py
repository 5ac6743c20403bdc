from __future__ import annotations

import tomllib

from hypothesis import given
from hypothesis import strategies as st

from cortex.settings.positions import line_of, positions

TEXT = '''\
top = 1 # [not.a.header]
"quoted key" = """
[not.a.header]
escaped = \\"\\"\\"
"""
dotted.inner = [
  1, # ]
  "]", [2, 3],
]
[table] # comment
'single' = \'\'\'
x = "unbalanced
\'\'\'
inline = { a = 1, b = [1, 2] }
[[models]]
id = "a"
[models.cost]
input = 1
[[models]]
id = "b"
[[models.parts]]
n = 1
[[models.parts]]
n = 2
'''


def test_every_statement_has_its_line() -> None:
    tomllib.loads(TEXT)
    assert positions(TEXT) == {
        ("top",): 1,
        ("quoted key",): 2,
        ("dotted", "inner"): 6,
        ("table",): 10,
        ("table", "single"): 11,
        ("table", "inline"): 14,
        ("models", 0): 15,
        ("models", 0, "id"): 16,
        ("models", 0, "cost"): 17,
        ("models", 0, "cost", "input"): 18,
        ("models", 1): 19,
        ("models", 1, "id"): 20,
        ("models", 1, "parts", 0): 21,
        ("models", 1, "parts", 0, "n"): 22,
        ("models", 1, "parts", 1): 23,
        ("models", 1, "parts", 1, "n"): 24,
    }


def test_key_inside_inline_value_gets_the_line_of_its_statement() -> None:
    known = positions(TEXT)
    assert line_of(("table", "inline", "b", 1), known) == 14
    assert line_of(("nowhere",), known) is None


@given(
    st.lists(st.tuples(st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.text(max_size=20)), unique_by=lambda p: p[0])
)
def test_scan_agrees_with_tomllib_on_arbitrary_strings(pairs: list[tuple[str, str]]) -> None:
    lines = [f'{key} = "{_escaped(value)}"' for key, value in pairs]
    text = "\n".join(lines)
    assert set(tomllib.loads(text)) == {key for key, _ in pairs}
    assert positions(text) == {(key,): number for number, (key, _) in enumerate(pairs, 1)}


def _escaped(value: str) -> str:
    return "".join(f"\\U{ord(c):08X}" if c in '"\\' or not c.isprintable() else c for c in value).replace(
        "\\U0000005C", "\\\\"
    )
