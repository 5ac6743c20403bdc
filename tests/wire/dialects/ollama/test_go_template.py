"""Ollama's prompt templates as chat templates: the prompts that they write."""

from __future__ import annotations

from typing import Any, Final

import pytest

from cortex.neuron.text.template.chat_template import ChatTemplate
from cortex.wire.dialects.ollama.go_template import TemplateProblem, to_jinja

CHATML: Final = (
    "{{ if .System }}<|im_start|>system\n{{ .System }}<|im_end|>\n{{ end }}"
    "{{ if .Prompt }}<|im_start|>user\n{{ .Prompt }}<|im_end|>\n{{ end }}"
    "<|im_start|>assistant\n{{ .Response }}<|im_end|>\n"
)
CHATML_LOOP: Final = """\
{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 -}}
<|im_start|>{{ .Role }}
{{ .Content }}
{{- if or (ne .Role "assistant") (not $last) }}<|im_end|>
{{ end }}
{{- if and (ne .Role "assistant") $last }}<|im_start|>assistant
{{ end }}
{{- end }}"""
CHATML_PROMPT: Final = (
    "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
    "<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n"
)
LLAMA_3: Final = """\
{{- if or .System .Tools }}<|start_header_id|>system<|end_header_id|>
{{- if .System }}

{{ .System }}
{{- end }}
{{- if .Tools }}

Cutting Knowledge: {{ index .Tools 0 }}
{{- end }}<|eot_id|>
{{- end }}
{{- range $i, $_ := .Messages }}
{{- $last := eq (len (slice $.Messages $i)) 1 }}
{{- if eq .Role "user" }}
{{- if and $.Tools $last }}<|start_header_id|>user<|end_header_id|>

{{ range $.Tools }}{{ . }}{{ end }}
{{- else }}<|start_header_id|>user<|end_header_id|>

{{ .Content }}<|eot_id|>{{ if $last }}<|start_header_id|>assistant<|end_header_id|>

{{ end }}
{{- end }}
{{- else if eq .Role "assistant" }}<|start_header_id|>assistant<|end_header_id|>

{{- if .ToolCalls }}
{{ range .ToolCalls }}{"name": "{{ .Function.Name }}"}{{ end }}
{{- else }}

{{ .Content }}
{{- end }}{{ if not $last }}<|eot_id|>{{ end }}
{{- else if eq .Role "tool" }}<|start_header_id|>ipython<|end_header_id|>

{{ .Content }}<|eot_id|>{{ if $last }}<|start_header_id|>assistant<|end_header_id|>

{{ end }}
{{- end }}
{{- end }}"""
LLAMA_3_PROMPT: Final = (
    "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nA<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nC<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)

SHAPES: Final = {
    "chatml": (CHATML, f"<s>{CHATML_PROMPT}"),
    "chatml with messages": (CHATML_LOOP, f"<s>{CHATML_PROMPT}"),
    "llama 3": (
        "{{ if .System }}<|start_header_id|>system<|end_header_id|>\n\n{{ .System }}<|eot_id|>{{ end }}"
        "{{ if .Prompt }}<|start_header_id|>user<|end_header_id|>\n\n{{ .Prompt }}<|eot_id|>{{ end }}"
        "<|start_header_id|>assistant<|end_header_id|>\n\n{{ .Response }}<|eot_id|>",
        LLAMA_3_PROMPT,
    ),
    "llama 3 with messages and tools": (LLAMA_3, LLAMA_3_PROMPT),
    "llama 2": (
        "[INST] {{ if .System }}<<SYS>>{{ .System }}<</SYS>>\n\n{{ end }}{{ .Prompt }} [/INST]",
        "<s>[INST] <<SYS>>S<</SYS>>\n\nA [/INST]B[INST] C [/INST]",
    ),
    "mistral": (
        "[INST] {{ if .System }}{{ .System }} {{ end }}{{ .Prompt }} [/INST] {{ .Response }}</s>",
        "<s>[INST] S A [/INST] B</s>[INST] C [/INST] ",
    ),
    "mistral with its own beginning": ("<s>[INST]{{ .Prompt }}[/INST]", "<s>[INST]A[/INST]B<s>[INST]C[/INST]"),
    "gemma": (
        "<start_of_turn>user\n{{ if .System }}{{ .System }} {{ end }}{{ .Prompt }}<end_of_turn>\n"
        "<start_of_turn>model\n{{ .Response }}<end_of_turn>\n",
        "<s><start_of_turn>user\nS A<end_of_turn>\n<start_of_turn>model\nB<end_of_turn>\n"
        "<start_of_turn>user\nC<end_of_turn>\n<start_of_turn>model\n",
    ),
    "gemma with messages": (
        "{{- range $i, $_ := .Messages }}\n{{- $last := eq (len (slice $.Messages $i)) 1 }}\n"
        '{{- if or (eq .Role "user") (eq .Role "system") }}<start_of_turn>user\n{{ .Content }}<end_of_turn>\n'
        "{{ if $last }}<start_of_turn>model\n{{ end }}\n"
        '{{- else if eq .Role "assistant" }}<start_of_turn>model\n{{ .Content }}'
        "{{ if not $last }}<end_of_turn>\n{{ end }}\n{{- end }}\n{{- end }}",
        "<s><start_of_turn>user\nS<end_of_turn>\n<start_of_turn>user\nA<end_of_turn>\n<start_of_turn>model\nB"
        "<end_of_turn>\n<start_of_turn>user\nC<end_of_turn>\n<start_of_turn>model\n",
    ),
    "phi 3": (
        "{{ if .System }}<|system|>\n{{ .System }}<|end|>\n{{ end }}{{ if .Prompt }}<|user|>\n{{ .Prompt }}<|end|>\n"
        "{{ end }}<|assistant|>\n{{ .Response }}<|end|>\n",
        "<s><|system|>\nS<|end|>\n<|user|>\nA<|end|>\n<|assistant|>\nB<|end|>\n<|user|>\nC<|end|>\n<|assistant|>\n",
    ),
    "alpaca": (
        "{{ if .System }}{{ .System }}\n\n{{ end }}{{ if .Prompt }}### Instruction:\n{{ .Prompt }}\n\n{{ end }}"
        "### Response:\n{{ .Response }}\n\n",
        "<s>S\n\n### Instruction:\nA\n\n### Response:\nB\n\n### Instruction:\nC\n\n### Response:\n",
    ),
    "vicuna": (
        "{{ if .System }}{{ .System }} {{ end }}{{ if .Prompt }}USER: {{ .Prompt }} {{ end }}"
        "ASSISTANT: {{ .Response }}</s>",
        "<s>S USER: A ASSISTANT: B</s>USER: C ASSISTANT: ",
    ),
    "zephyr": (
        "{{- /* of Zephyr */ -}}\n{{- if .System }}\n<|system|>\n{{ .System }}</s>\n{{- end }}\n"
        "<|user|>\n{{ .Prompt }}</s>\n<|assistant|>\n",
        "<s>\n<|system|>\nS</s>\n<|user|>\nA</s>\n<|assistant|>\nB\n<|user|>\nC</s>\n<|assistant|>\n",
    ),
    "plain": ("{{ .System }} {{ .Prompt }}", "<s>S AB C"),
}
CONVERSATION: Final = (("system", "S"), ("user", "A"), ("assistant", "B"), ("user", "C"))


def rendered(template: str, *turns: tuple[str, str], **more: Any) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    values = {"messages": messages, "add_generation_prompt": True, "document_start": "<s>", **more}
    return ChatTemplate(to_jinja(template)).render(values)


@pytest.mark.parametrize("shape", SHAPES)
def test_converted_template_writes_the_prompt_that_ollama_writes(shape: str) -> None:
    template, expected = SHAPES[shape]
    assert rendered(template, *CONVERSATION) == expected


def test_turns_of_one_role_are_one_and_none_is_lost() -> None:
    turns = (("user", "A"), ("user", "B"), ("system", "S"), ("user", "C"), ("user", ""))
    assert rendered(CHATML, *turns, document_start="") == (
        "<|im_start|>user\nA\n\nB<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("template", [CHATML, CHATML_LOOP])
def test_last_response_is_continued(template: str) -> None:
    assert rendered(template, ("user", "A"), ("assistant", "B")).endswith("<|im_start|>assistant\nB")


def test_finished_turn_of_a_template_without_messages_ends_as_it_says() -> None:
    text = rendered(CHATML, ("user", "A"), ("assistant", "B"), add_generation_prompt=False)
    assert text.endswith("<|im_start|>assistant\nB<|im_end|>\n")


def test_text_of_the_template_is_text() -> None:
    assert (
        rendered('{% if %} {{ "\\"{#" }}\n ü🙂 {{ .Prompt }} #}', ("user", "{{ 1 }}"))
        == '<s>{% if %} "{#\n ü🙂 {{ 1 }} #}'
    )


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("no place", "no place for messages"),
        ("{{ .Nothing }}", r"it has \.Nothing"),
        ("{{ index .Messages 0 }}", "it has the function index"),
        ("{{ .Prompt | upper }}", "is not known"),
        ("{{ if .System }}{{ .Prompt }}", "has no end"),
        ("{{ end }}", "not inside"),
        ("{{ range .Messages }}{{ .Content }}{{ else }}x{{ end }}", "a range has an else"),
        ("{{ if .Prompt }}{{ .Response }}{{ end }}", "inside of an if"),
        ("{{ with .System }}x{{ end }}", "with"),
        ("{{ (.Prompt }}", "parenthesis"),
        ("{{ .Prompt", "not closed"),
        ('{{ $x := "a" }}{{ $x = "b" }}{{ .Prompt }}', "is not known"),
    ],
)
def test_what_cannot_be_converted_is_named(template: str, problem: str) -> None:
    with pytest.raises(TemplateProblem, match=problem):
        to_jinja(template)
