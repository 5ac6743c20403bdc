"""Calls in the syntax of each family: streamed or not, well written, sloppy and cut off."""

from __future__ import annotations

import pytest

from cortex.neuron.families.tool_calls import ToolSyntax

from ..conftest import random_splits
from ..responses import Parts, call, parse
from ..syntax_names import S

CALL = call("get_weather", city="Zürich\n", days=3)
STOP = call("stop")
CITY = '{"city": "Zürich\\n", "days": 3}'
ITEM = f'{{"name": "get_weather", "arguments": {CITY}}}'
MISTRAL = f"[TOOL_CALLS]get_weather[ARGS]{CITY}"
GLM = (
    "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Zürich\n</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>"
)
SEED = (
    "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Zürich\n</parameter>\n<parameter=days>3</parameter>\n"
    "</function>\n</seed:tool_call>"
)
INVOKE = (
    '<invoke name="get_weather">\n<parameter name="city">Zürich\n</parameter>\n<parameter name="days">3</parameter>\n'
    "</invoke>"
)
MINIMAX = f"<minimax:tool_call>\n{INVOKE}\n</minimax:tool_call>"
ATEM = INVOKE.replace("<", "<atem:").replace("<atem:/", "</atem:")
PYTHON = 'get_weather(city="Zürich\\n", days=3)'
COHERE = f'{{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {CITY}}}'
GEMMA = '<|tool_call>call:get_weather{city:<|"|>Zürich\n<|"|>,days:3}<tool_call|>'
DSML = (
    '<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Zürich\n</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>'
)
DEEPSEEK = f"<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{CITY}<｜tool▁call▁end｜>"
BLOCK = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{CITY}\n```<｜tool▁call▁end｜>"
KIMI = f"<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{CITY}<|tool_call_end|>"
SOLAR = f"<|tool_call:begin|>ab12<|tool_call:name|>get_weather<|tool_call:args|>{CITY}<|tool_call:end|>"
HARMONY = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{CITY}<|call|>"
IN_ROLE = f"<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{CITY}<|call|>"

WELL_WRITTEN: list[tuple[ToolSyntax, str, int]] = [
    (S.MISTRAL, MISTRAL, 1),
    (S.MISTRAL, MISTRAL + MISTRAL, 2),
    (S.MISTRAL, f"[TOOL_CALLS] [{ITEM}, {ITEM}]", 2),
    (S.MISTRAL_JSON, f"[TOOL_CALLS][{ITEM},{ITEM}]", 2),
    (S.MISTRAL, f"[TOOL_CALLS]get_weather[CALL_ID]a1b2c3d4e[ARGS]{CITY}", 1),
    (S.MISTRAL, f"[TOOL_CALLS] get_weather {CITY}", 1),
    (S.GLM_XML, GLM, 1),
    (S.GLM_XML, f"{GLM}\n{GLM}", 2),
    (S.GLM_XML, GLM.replace("\n<", "<").replace("Zürich<", "Zürich\n<"), 1),
    (S.SEED_XML, SEED, 1),
    (S.SEED_XML, SEED + SEED, 2),
    (S.SEED_XML, SEED.removeprefix("<seed:tool_call>\n"), 1),
    (S.MINIMAX_XML, MINIMAX, 1),
    (S.MINIMAX_XML, f"<minimax:tool_call>\n{INVOKE}\n{INVOKE}\n</minimax:tool_call>", 2),
    (S.MINIMAX_XML, MINIMAX.replace('"', ""), 1),
    (S.MUSE_XML, f"<atem:function_calls>\n{ATEM}\n</atem:function_calls>", 1),
    (S.MUSE_XML, f"<atem:function_calls>\n{ATEM}\n{ATEM}\n</atem:function_calls>", 2),
    (S.MUSE_XML, ATEM.replace('"', ""), 1),
    (S.LFM2, f"<|tool_call_start|>[{PYTHON}]<|tool_call_end|>", 1),
    (S.LFM2, f"<|tool_call_start|>[{PYTHON}, {PYTHON}]<|tool_call_end|>", 2),
    (S.LFM2, "<|tool_call_start|>[get_weather('Zürich\n', days=3)]<|tool_call_end|>", 1),
    (S.LFM2, "<|tool_call_start|>get_weather(**{'city': '''Zürich\n''', 'days': 3})", 1),
    (S.OLMO, f"<function_calls>{PYTHON}</function_calls>", 1),
    (S.OLMO, f"<function_calls>\n{PYTHON}\n{PYTHON}\n</function_calls>", 2),
    (S.PHI_JSON, f"<|tool_call|>[{ITEM}, {ITEM}]<|/tool_call|>", 2),
    (S.GRANITE_JSON, f"<|tool_call|>[{ITEM}, {ITEM}]", 2),
    (S.GRANITE_JSON, f"<|tool_call|>{ITEM}", 1),
    (S.COHERE_JSON, f"<|START_ACTION|>[\n    {COHERE},\n    {COHERE}\n]<|END_ACTION|>", 2),
    (S.HUNYUAN_JSON, f"<tool_calls>[{ITEM}]</tool_calls>", 1),
    (S.HERMES_JSON, f"<tool_call>[{ITEM}]</tool_call>", 1),
    (S.GEMMA, GEMMA, 1),
    (S.GEMMA, GEMMA + GEMMA, 2),
    (S.DSML, f"<｜DSML｜function_calls>\n{DSML}\n{DSML}\n</｜DSML｜function_calls>", 2),
    (S.DSML_CALLS, f"<｜DSML｜tool_calls>\n{DSML}\n</｜DSML｜tool_calls>", 1),
    (S.DSML, DSML, 1),
    (S.DEEPSEEK, f"<｜tool▁calls▁begin｜>{DEEPSEEK}{DEEPSEEK}<｜tool▁calls▁end｜>", 2),
    (S.DEEPSEEK, f"<｜tool▁calls▁begin｜>{BLOCK}\n{DEEPSEEK}<｜tool▁calls▁end｜>", 2),
    (S.DEEPSEEK, DEEPSEEK, 1),
    (S.DEEPSEEK_BLOCK, f"<｜tool▁calls▁begin｜>{BLOCK}\n{BLOCK}<｜tool▁calls▁end｜>", 2),
    (S.DEEPSEEK_BLOCK, f"<｜tool▁calls▁begin｜>{BLOCK.removeprefix('<｜tool▁call▁begin｜>')}", 1),
    (S.KIMI, f"<|tool_calls_section_begin|>{KIMI}{KIMI.replace(':0', ':1')}<|tool_calls_section_end|>", 2),
    (S.KIMI, KIMI.replace("functions.", "").replace(":0", ""), 1),
    (S.SOLAR, f"<|tool_calls|>{SOLAR}{SOLAR}<|calls|>", 2),
    (S.NEMOTRON_JSON, f"<TOOLCALL>[{ITEM}, {ITEM}]</TOOLCALL>", 2),
    (S.GIGACHAT_JSON, f"<|function_call|>{ITEM}", 1),
    (S.HARMONY, HARMONY, 1),
    (S.HARMONY, IN_ROLE, 1),
    (S.HARMONY, IN_ROLE + IN_ROLE, 2),
    (S.HARMONY, IN_ROLE.replace("functions.", ""), 1),
    (S.HARMONY, IN_ROLE.removesuffix("<|call|>"), 1),
    (S.HARMONY, HARMONY.replace("<|constrain|>json", "code").replace("commentary", "analysis"), 1),
]


def same_for_every_split(text: str, syntax: ToolSyntax, *, is_cut: bool = False) -> Parts:
    whole = parse([text], syntax, is_cut=is_cut)
    for pieces in random_splits(text, seed=len(text), count=20):
        assert parse(pieces, syntax, is_cut=is_cut) == whole
    return whole


@pytest.mark.parametrize(("syntax", "text", "num_calls"), WELL_WRITTEN)
def test_calls_are_read_with_and_without_text_before_them(syntax: ToolSyntax, text: str, num_calls: int) -> None:
    assert same_for_every_split(text, syntax) == [CALL] * num_calls
    assert same_for_every_split(f"I look.\n\n{text}\n", syntax) == [("text", "I look."), *[CALL] * num_calls]


@pytest.mark.parametrize(("syntax", "text", "num_calls"), WELL_WRITTEN)
def test_call_cut_off_anywhere_never_shows_markup(syntax: ToolSyntax, text: str, num_calls: int) -> None:
    for cut in range(1, len(text), 1 + len(text) // 80):
        parts = parse([text[:cut]], syntax, is_cut=True)
        assert parts == parse(list(text[:cut]), syntax, is_cut=True)
        assert not [part for part in parts if part[0] in ("text", "malformed")], text[:cut]
        calls = [part for part in parts if part[0] == "call"]
        assert calls == [CALL] * len(calls)
        assert len(calls) <= num_calls


@pytest.mark.parametrize(
    ("syntax", "text", "expected"),
    [
        (S.MISTRAL, "[TOOL_CALLS]stop{}", [STOP]),
        (S.MISTRAL, "[TOOL_CALLS]I call stop.", [("text", "I call stop.")]),
        (S.MISTRAL, "[TOOL_CALLS][ARGS]{}", [("text", "{}")]),
        (S.MISTRAL, "Hi[/INST] [ARGS] there", [("text", "Hi[/INST]  there")]),
        (S.MISTRAL, '[TOOL_CALLS]stop[ARGS]{"a": "cut', [("cut off", "stop", '{"a": "cut')]),
        (S.MISTRAL, '{"name": "stop"}', [("text", '{"name": "stop"}')]),
        (S.GLM_XML, "<tool_call>stop</tool_call>", [STOP]),
        (S.GLM_XML, "<tool_call>stop\n</tool_call>", [STOP]),
        (S.GLM_XML, "<tool_call> is a tag", [("text", "<tool_call> is a tag")]),
        (S.GLM_XML, "<tool_call></tool_call>", [("text", "<tool_call></tool_call>")]),
        (
            S.GLM_XML,
            "<tool_call>get_weather<arg_key>where</arg_key><arg_value>[1</arg_value>",
            [("cut off", "get_weather", '{"where": ')],
        ),
        (S.SEED_XML, '<seed:tool_call><function="stop"></function></seed:tool_call>', [STOP]),
        (S.MINIMAX_XML, "<minimax:tool_call><invoke name='stop'></invoke>", [STOP]),
        (S.LFM2, "<|tool_call_start|>[stop()]<|tool_call_end|> Done.", [STOP, ("text", "Done.")]),
        (S.LFM2, "<|tool_call_start|>[stop(a=x)]<|tool_call_end|>", [("text", "[stop(a=x)]")]),
        (S.LFM2, "stop() ends it", [("text", "stop() ends it")]),
        (
            S.LFM2,
            "<|tool_call_start|>[stop(a=[-1.5, (True, null)], b={'c': \")'\"}, d='\\ud83d\\ude00')]",
            [call("stop", a=[-1.5, [True, None]], b={"c": ")'"}, d="😀")],
        ),
        *(
            (S.LFM2, f"<|tool_call_start|>{text}<|tool_call_end|>", [("text", text)])
            for text in (
                "stop(1)",
                "stop(a=1e999)",
                "stop(a=0x" + "f" * 2000 + ")",
                "stop(a=" + "[" * 60 + "]" * 60 + ")",
                "stop(a=__import__('os'))",
                "stop(a={1, 2})",
                "stop(a=b'x')",
                "stop(**[1])",
            )
        ),
        (S.PHI_JSON, "<|tool_call|>none<|/tool_call|>", [("text", "none")]),
        (S.HERMES_JSON, '<tool_call>{"name": "stop<|im_end|>", "arguments": {}}</tool_call>', [STOP]),
        (S.HERMES_JSON, '<tool_call>{"name": "<|im_end|>", "arguments": {}}', None),
        (S.HERMES_JSON, '<tool_call>{"arguments": {"a": "\\ud800"}, "name": "stop"}</tool_call>', None),
        (S.HERMES_JSON, '<tool_call>{"arguments": {"a": 1e999}, "name": "stop"}</tool_call>', None),
        (S.GEMMA, "<|tool_call>call:stop{}", [STOP]),
        (S.NAME_LINE, f"get_weather\n{CITY}", [CALL]),
        (S.NAME_LINE, f"get_weather\n{CITY}\nstop\n{{}}", [CALL, STOP]),
        (S.NAME_LINE, "stop\nis a word", [("text", "stop\nis a word")]),
        (S.NAME_LINE, f"Use get_weather\n{CITY}", [("text", f"Use get_weather\n{CITY}")]),
        *((kind, f"[{PYTHON}]", [CALL]) for kind in (S.LLAMA_JSON, S.PLAIN_JSON)),
        (S.LLAMA_JSON, f"[{PYTHON}, stop()]\n", [CALL, STOP]),
        (S.LLAMA_JSON, "[1, 2]", [("text", "[1, 2]")]),
        (S.LLAMA_JSON, "[other(a=1)]", [("text", "[other(a=1)]")]),
        (S.LLAMA_JSON, "See [stop()]", [("text", "See [stop()]")]),
        (S.DEEPSEEK, "<｜tool▁calls▁begin｜>I would call stop.", [("text", "I would call stop.")]),
        (S.DEEPSEEK, "<｜tool▁call▁begin｜>stop<｜tool▁sep｜>{}Done.<｜tool▁calls▁end｜>", [STOP, ("text", "Done.")]),
        (S.KIMI, "<|tool_call_begin|>functions.stop:12<|tool_call_argument_begin|>{}", [STOP]),
        (S.KIMI, "Hi<|tool_calls_section_end|>", [("text", "Hi")]),
        (S.DSML, "<｜DSML｜function_calls>none", [("text", "<function_calls>none")]),
        (S.DSML, "a <｜DSML｜", [("text", "a <")]),
        (S.GEMMA, "<|tool_call>call:stop{a:[1,{b:true}]}<tool_call|>", [call("stop", a=[1, {"b": True}])]),
        (S.GEMMA, "<|tool_call>call:stop{a:}<tool_call|>", [("text", "call:stop{a:}")]),
    ],
)
def test_sloppy_calls_are_read_leniently(syntax: ToolSyntax, text: str, expected: Parts | None) -> None:
    parts = same_for_every_split(text, syntax)
    assert expected is None or parts == expected
    "".join(piece for part in parts for piece in part).encode()  # what is sent must be encodable


def test_beginning_of_a_marker_is_text_if_the_model_ended_there() -> None:
    assert parse(["a < b <tool_call"], S.HERMES_JSON) == [("text", "a < b <tool_call")]
    assert parse(["a < b <tool_call"], S.HERMES_JSON, is_cut=True) == [("text", "a < b")]
