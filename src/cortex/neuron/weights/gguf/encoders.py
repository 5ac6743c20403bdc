"""Encoders in GGUF files, and the pooling of embedding and rerank models."""

from __future__ import annotations

import re
from typing import Any, Final

from cortex.neuron.families.gguf import GGUFArchitecture
from cortex.neuron.weights.errors import Unsupported
from cortex.neuron.weights.gguf.keys import Keys
from cortex.neuron.weights.gguf.metadata import GGUFFile
from cortex.neuron.weights.pooling_files import RERANK_TEMPLATE

_MODES: Final = {1: "mean", 2: "cls", 3: "last"}
_RANK: Final = 4
_WHOLE: Final = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embed_norm",
    "token_types": "model.embed_segments",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "cls": "cls",
    "cls.output": "cls.output",
    "cls.norm": "cls.norm",
}
_PER_LAYER: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "attn_norm",
    "attn_output_norm": "attn_norm",
    "ffn_norm": "mlp_norm",
    "layer_output_norm": "mlp_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME: Final = re.compile(r"(?:blk\.(?P<layer>\d{1,6})\.)?(?P<part>[\w.]+?)\.(?P<kind>weight|bias)")


def encoder_tensor(name: str, architecture: GGUFArchitecture) -> str:
    """The name under which layers read a tensor. Raises Unsupported."""
    match = _NAME.fullmatch(name)
    own = None if match is None else (_WHOLE if match["layer"] is None else _PER_LAYER).get(match["part"])
    if match is None or own is None:
        raise Unsupported(f"the GGUF file has a tensor {name[:200]!r} that {architecture.name} does not use")
    if match["layer"] is None:
        return f"{own}.{match['kind']}"
    own = architecture.tensor_names.get(match["part"], own)
    return f"model.layers.{int(match['layer'])}.{own}.{match['kind']}"


def encoder_config(file: GGUFFile, model_type: str, keys: Keys) -> dict[str, Any]:
    """The config in the hub's format, without the family's own options. Raises CheckpointError."""
    tensors, hidden = file.tensors, keys.count("embedding_length")
    return {
        "model_type": model_type,
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "num_hidden_layers": keys.count("block_count"),
        "num_attention_heads": keys.count("attention.head_count"),
        "intermediate_size": keys.count("feed_forward_length"),
        "max_position_embeddings": keys.count("context_length"),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "type_vocab_size": tensors["token_types.weight"].shape[0] if "token_types.weight" in tensors else 0,
        "torch_dtype": "float16",
    }


def gguf_pooling(file: GGUFFile, architecture: GGUFArchitecture, hidden: int) -> dict[str, Any] | None:
    """As `pooling_files.pooling_of`; None for a model that generates text. Raises Unsupported."""
    kind = file.metadata.get(f"{architecture.name}.pooling_type")
    if kind in (None, 0) and not architecture.pools:
        return None
    if kind == _RANK:
        return _rank(file, hidden, is_encoder=architecture.pools)
    mode = _MODES.get(kind or 1)
    if mode is None:
        raise Unsupported(f"{file.path} pools in a way ({str(kind)[:20]}) that is not supported")
    steps: list[Any] = [
        ("dense", {"source": name, "inputs": shape[1], "outputs": shape[0], "bias": False})
        for name in ("dense_2", "dense_3")
        if (tensor := file.tensors.get(f"{name}.weight")) is not None and len(shape := tensor.shape) == 2
    ]
    # Files say nothing about it, and programs that read them normalise vectors.
    return {"task": "embed", "modes": [mode], "steps": [*steps, ("normalize", {})]}


def _rank(file: GGUFFile, hidden: int, *, is_encoder: bool) -> dict[str, Any]:
    tensors = file.tensors

    def dense(source: str, outputs: int, activation: str) -> tuple[str, Any]:
        bias = f"{source}.bias" in tensors
        options = {"source": source, "inputs": hidden, "outputs": outputs, "bias": bias, "activation": activation}
        return "dense", options

    last = tensors.get("cls.output.weight") or tensors.get("cls.weight")
    if last is None:
        raise Unsupported(f"{file.path} is a rerank model without a head; convert it again")
    steps: list[Any] = []
    if "cls.output.weight" in tensors and "cls.weight" in tensors:
        steps.append(dense("cls", hidden, "gelu" if "cls.norm.weight" in tensors else "tanh"))
        if "cls.norm.weight" in tensors:
            bias = "cls.norm.bias" in tensors
            steps.append(("norm", {"source": "cls.norm", "size": hidden, "eps": 1e-5, "bias": bias}))
    num_labels = 1 if len(last.shape) == 1 else last.shape[0]
    steps.append(dense("cls.output" if "cls.output.weight" in tensors else "cls", num_labels, "identity"))
    if num_labels == 2 and not is_encoder:  # the logits of two tokens
        steps.append(("difference", {}))
    pooling = {"task": "score", "modes": ["cls" if is_encoder else "last"], "steps": steps, "activation": "sigmoid"}
    return pooling if is_encoder else {**pooling, "template": RERANK_TEMPLATE}
