"""The chat template of Mistral's models whose repositories have none: the version of their tokenizer says how
conversations are written."""

from __future__ import annotations

from string import Template
from typing import Final

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
"""Expressions of the template, of which versions change some."""
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
