"""Finds a model's chat template, in the same order as the reference library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any, Final

from cortex.neuron.text.errors import TextFileMalformed, TokenizerUnsupported
from cortex.neuron.text.files import MAX_TEMPLATE_BYTES, MAX_TOKENIZER_BYTES, TEKKEN, read_json, read_limited

VERSIONS: Final = (3, 7, 11, 13)
"""The versions of `tekken.json` that have a template here."""
_TEMPLATE: Final = Template("""
{%- macro written(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for block in content or [] %}{{- block.text if block.type == "text" else "[IMG]" }}{%- endfor %}
    {%- endif %}
{%- endmacro %}
{%- macro checked(id) %}
    {%- if id is not string or id|length != 9 %}{{- raise_exception("ids of calls have nine characters") }}{%- endif %}
    {{- id }}
{%- endmacro %}
{%- macro described(tools) %}
    {%- if tools %}{{- "[AVAILABLE_TOOLS]" + tools|tojson + "[/AVAILABLE_TOOLS]" }}{%- endif %}
{%- endmacro %}
{{- bos_token }}
{%- set num_users = messages|selectattr("role", "equalto", "user")|list|length %}
{%- set users = namespace(seen=0) %}
{%- set system = messages|selectattr("role", "equalto", "system")|list %}
{%- for message in messages %}
    {%- if message.role == "system" %}
        {{- $system }}
    {%- elif message.role == "user" %}
        {%- set users.seen = users.seen + 1 %}
        {{- described(tools if users.seen == $described_at else none) + "[INST]" + $question + "[/INST]" }}
    {%- elif message.role == "assistant" %}
        {{- $reasoning + written(message.content) }}
        {%- for call in message.tool_calls or [] %}
            {{- $call }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif message.role == "tool" %}
        {{- "[TOOL_RESULTS]" + $result + "[/TOOL_RESULTS]" }}
    {%- else %}
        {{- raise_exception("messages have the roles system, user, assistant and tool, not " + message.role) }}
    {%- endif %}
{%- endfor %}
{{- described(none if num_users else tools) }}
""")
_PARTS: Final = {
    "described_at": "num_users",
    "system": '"[SYSTEM_PROMPT]" + written(message.content) + "[/SYSTEM_PROMPT]"',
    "question": "written(message.content)",
    "reasoning": '""',
    "call": '"[TOOL_CALLS]" + call.function.name + "[ARGS]" + call.function.arguments|tojson',
    "result": "written(message.content)",
}
"""Expressions of the template; versions replace some of them."""
_WITH_IDS: Final = {
    "call": '"[TOOL_CALLS]" + call.function.name + "[CALL_ID]" + checked(call.id) + "[ARGS]"'
    " + call.function.arguments|tojson",
    "result": 'checked(message.tool_call_id) + "[TOOL_CONTENT]" + written(message.content)',
}
_IN_A_LIST: Final = {
    "call": """("[TOOL_CALLS][" if loop.first else ", ") + '{"name": ' + call.function.name|tojson"""
    """ + ', "arguments": ' + call.function.arguments|tojson + ', "id": "' + checked(call.id) + '"}'"""
    """ + ("]" if loop.last else "")""",
}
_WITHOUT_SYSTEM: Final = {
    "system": '""',
    "question": '(written(system[0].content) + "\\n\\n" if system and loop.last else "") + written(message.content)',
    "result": """'{"content": ' + written(message.content) + ', "call_id": "' + checked(message.tool_call_id) + '"}'""",
}


def mistral_template(version: int, *, reasons: bool) -> str:
    """`version`: that of `tekken.json`, one of VERSIONS. `reasons`: whether the vocabulary has marks of reasoning."""
    parts = dict(_PARTS)
    if version >= 13:
        parts["described_at"] = "1"  # the tools of a growing conversation stay where they are in the prefix cache
    else:
        parts |= _WITH_IDS
    if version < 11:
        parts |= _IN_A_LIST
    if version < 7:
        parts |= _WITHOUT_SYSTEM
    if reasons:
        parts["reasoning"] = '("[THINK]" + message.reasoning_content + "[/THINK]" if message.reasoning_content else "")'
    return _TEMPLATE.substitute(parts)


_GGUF_KEY = "tokenizer.chat_template"


@dataclass(frozen=True, slots=True)
class TemplateSources:
    """A model's templates. Some models have a second one for conversations with tools."""

    default: str | None
    with_tools: str | None = None


def from_directory(path: Path) -> TemplateSources:
    """`chat_template.jinja`, then `chat_template.json`, then `tokenizer_config.json`. Models with Mistral's own
    tokenizer alone and no template have that of its version. Raises TextFileMalformed, or TokenizerUnsupported for
    another version."""
    for file in (path / "chat_template.jinja", path / "chat_template.jinja2"):
        try:
            default = _read(file)
        except FileNotFoundError:
            continue
        tools = path / "additional_chat_templates" / "tool_use.jinja"
        return TemplateSources(default, _read(tools) if tools.exists() else None)
    for name in ("chat_template.json", "tokenizer_config.json"):
        stated = read_json(path / name).get("chat_template")
        if stated is not None:
            return _parse(stated, path / name)
    if (path / TEKKEN).exists() and not (path / "tokenizer.json").exists():
        return TemplateSources(_from_tekken(path / TEKKEN))
    return TemplateSources(None)


def from_gguf(metadata: Mapping[str, Any]) -> TemplateSources:
    default = metadata.get(_GGUF_KEY)
    with_tools = metadata.get(f"{_GGUF_KEY}.tool_use")
    return TemplateSources(
        default if isinstance(default, str) else None, with_tools if isinstance(with_tools, str) else None
    )


def _from_tekken(file: Path) -> str:
    """The template of the version that `file` states; raises TextFileMalformed, or TokenizerUnsupported for others."""
    content = read_json(file, MAX_TOKENIZER_BYTES)
    config, listed = content.get("config"), content.get("special_tokens")
    stated = str(config.get("version")) if isinstance(config, Mapping) else ""
    known = {f"v{version}": version for version in VERSIONS}
    if stated not in known:
        raise TokenizerUnsupported(
            f"{file} is of version {stated!r:.20}, and chat templates are known for {', '.join(known)}; "
            "put the model's chat_template.jinja next to it"
        )
    tokens = [each.get("token_str") for each in listed if isinstance(each, Mapping)] if isinstance(listed, list) else ()
    return mistral_template(known[stated], reasons="[THINK]" in tokens)


def _read(file: Path) -> str:
    try:
        return read_limited(file, MAX_TEMPLATE_BYTES).decode()
    except UnicodeDecodeError as error:
        raise TextFileMalformed(f"{file} is not UTF-8; download the model again") from error


def _parse(stated: object, file: Path) -> TemplateSources:
    """A string, a mapping of names, or a list of `{name, template}`."""
    if isinstance(stated, str):
        return TemplateSources(stated)
    if isinstance(stated, list):
        stated = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, Mapping)}
    if isinstance(stated, Mapping) and all(isinstance(template, str) for template in stated.values()):
        return TemplateSources(stated.get("default"), stated.get("tool_use"))
    raise TextFileMalformed(f"the chat_template in {file} is neither text nor a list of named texts; fix the file")
