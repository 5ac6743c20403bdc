"""A checkpoint that plays scripts: whatever it is asked, it says what was written for that kind of question.

Embeddings are one-hot, the only layer adds nothing, and the head maps each token to the one that follows it. So the
last token of the prompt decides, and the model's chat template writes one that fits the conversation: a call if there
is a tool of `TOOLS`, a reply once a tool has returned, JSON where the user asks for it, and else a greeting. Sampling,
grammars and parsers work as for every model.

A piece of a script is a token of its own. The object `WEATHER` is the end of several scripts. Its tokens are shared by
them, and a call before it is one token, because a grammar forces text in the longest tokens that there are.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

END = "<|im_end|>"
WEATHER = '{"city": "Oslo", "days": 2}'
"""The arguments of every call, and the object that is said where JSON is asked for."""
GREETING = "Hello from the scripted model."
RESULT = "It is sunny in Oslo."
TOOLS = ("get_weather", "Weather", "final_result", "json")
"""Tools that the model calls when it has them."""
MAKE_FILE = "echo scripted > made.txt"
AGENT_TOOLS = {
    "Bash": {"command": MAKE_FILE},
    "exec_command": {"cmd": MAKE_FILE},
    "run_shell_command": {"command": MAKE_FILE, "is_background": False},
    "bash": {"command": MAKE_FILE, "description": "Makes it"},
}
"""The shells of coding agents, with the arguments of a call that makes made.txt, if the user asks for it."""
SCRIPTS = {
    "greeting": GREETING,
    "result": RESULT,
    "file": "hello.py\n```\nprint('scripted')\n```\n",
    "json": "",
    **{
        f"shell-{tool}": f'<tool_call>\n{{"name": "{tool}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
        for tool, arguments in AGENT_TOOLS.items()
    },
    **{f"call-{tool}": f'<tool_call>\n{{"name": "{tool}", "arguments": ' for tool in TOOLS},
}
"""What is said, by the name of the marker that starts it. Calls and `json` go on with `WEATHER_TOKENS`."""
WEATHER_TOKENS = ('{"', "city", '": "', "Oslo", '", "', "days", '": ', "2")
END_OF_OBJECT = "}"
END_OF_CALL = ("}}", "\n</tool_call>")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if tools %}<tools>{{ tools | tojson }}</tools>\n{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% set ns = namespace(said='greeting') %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if 'JSON' in m.content %}{% set ns.said = 'json' %}{% endif %}"
    "{% if 'hello.py' in m.content %}{% set ns.said = 'file' %}{% endif %}{% endif %}{% endfor %}"
    f"{{% for tool in tools or [] %}}{{% if tool.function.name in {list(TOOLS)} %}}"
    "{% set ns.said = 'call-' + tool.function.name %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'user' and 'made.txt' in m.content %}{% for tool in tools or [] %}"
    f"{{% if tool.function.name in {list(AGENT_TOOLS)} %}}"
    "{% set ns.said = 'shell-' + tool.function.name %}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'tool' %}{% set ns.said = 'result' %}{% endif %}{% endfor %}"
    "<|{{ ns.said }}|>{% endif %}"
)
HIDDEN = 512
"""More than there are tokens in the scripts, so that each of them has a dimension of its own."""
OTHER = HIDDEN - 1
"""The dimension of all other tokens. A grammar may force some of them; the script then goes on with a value."""
CERTAINTY = 100.0
VOCABULARY_SIZE = 4000
"""Tokens for prompts. Agents send long ones; with single bytes they would take minutes."""


def write_scripted_model(folder: Path, texts: Iterable[str]) -> Path:
    """Write the checkpoint with its tokenizer and template into a new folder. `texts` train the tokenizer."""
    folder.mkdir(parents=True)
    shared = [*WEATHER_TOKENS, *END_OF_CALL]
    trained = _trained_tokenizer(texts)
    used = frozenset(trained.get_vocab()) | {_spelled(token) for token in shared}
    scripts: dict[str, tuple[str, ...]] = {}
    for name, text in SCRIPTS.items():
        pieces = (text,) if text.startswith("<tool_call>") else _pieces(text, used)
        assert pieces is not None, f"{text!r} cannot be divided into tokens of its own"
        scripts[name] = tuple(map(_spelled, pieces))
        used |= frozenset(scripts[name])
    control = [END, "<|im_start|>", *(f"<|{name}|>" for name in scripts)]
    pieces_of_scripts = [piece for pieces in scripts.values() for piece in pieces]
    tokenizer = _with_tokens(trained, pieces_of_scripts, shared, control)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))
    ids = tokenizer.get_vocab()
    spoken = [*control, *pieces_of_scripts, *shared, END_OF_OBJECT]
    dimension_of = {token: dimension for dimension, token in enumerate(spoken)}
    embedding, head = torch.zeros(len(ids), HIDDEN), torch.zeros(len(ids), HIDDEN)
    embedding[:, OTHER] = 1
    for token, dimension in dimension_of.items():
        embedding[ids[token]] = 0
        embedding[ids[token], dimension] = 1
    for certainty, token in enumerate(('"', "2", "Oslo"), start=1):
        head[ids[token], OTHER] = certainty * CERTAINTY / 10

    def say(*tokens: str, certainty: float = CERTAINTY) -> None:
        for token, following in itertools.pairwise(tokens):
            head[ids[following], dimension_of[token]] = certainty

    for name, pieces in scripts.items():
        has_object = name == "json" or name.startswith("call-")
        say(f"<|{name}|>", *pieces, WEATHER_TOKENS[0] if has_object else END)
    say(*WEATHER_TOKENS, *END_OF_CALL, END)
    # A grammar for the object alone does not allow the end of a call.
    say(WEATHER_TOKENS[-1], END_OF_OBJECT, END, certainty=CERTAINTY / 2)
    _write_weights(folder, embedding, head, ids[END])
    return folder


def _pieces(text: str, used: frozenset[str]) -> tuple[str, ...] | None:
    """`text` in pieces of at least two characters whose spellings are not `used`; None if that is impossible."""
    if not text:
        return ()
    for length in range(2, len(text) + 1):
        spelled = _spelled(text[:length])
        if spelled not in used and (rest := _pieces(text[length:], used | {spelled})) is not None:
            return (text[:length], *rest)
    return None


def _spelled(text: str) -> str:
    """`text` as a byte-level vocabulary spells it."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


def _trained_tokenizer(texts: Iterable[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY_SIZE, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _with_tokens(trained: Tokenizer, pieces: list[str], shared: list[str], control: list[str]) -> Tokenizer:
    """`trained` with the tokens of scripts. Prompts never become `pieces`, which are only decoded."""
    settings = json.loads(trained.to_str())
    vocabulary = settings["model"]["vocab"]
    vocabulary |= {piece: len(vocabulary) + number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer.from_str(json.dumps(settings))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in shared])
    return tokenizer


def _write_weights(folder: Path, embedding: torch.Tensor, head: torch.Tensor, end_id: int) -> None:
    head_size = 16
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": head_size,
        "max_position_embeddings": 131072,
        "vocab_size": len(head),
        "rms_norm_eps": 1e-6,
        "eos_token_id": end_id,
    }
    (folder / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0"
    zeros = {
        **{f"{layer}.self_attn.{name}_proj.weight": (head_size, HIDDEN) for name in "qkv"},
        f"{layer}.self_attn.o_proj.weight": (HIDDEN, head_size),
        f"{layer}.mlp.gate_proj.weight": (32, HIDDEN),
        f"{layer}.mlp.up_proj.weight": (32, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, 32),
    }
    norms = ("model.norm", f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm")
    weights = {name: torch.zeros(shape) for name, shape in zeros.items()}
    weights |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    weights |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    save_file(weights, folder / "model.safetensors")
