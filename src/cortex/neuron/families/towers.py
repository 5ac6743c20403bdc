"""The layers of vision towers: the names of their tensors, in the hub's checkpoints and in GGUF files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class TowerLayer:
    """The tensors of a layer, under their names in the hub's checkpoints without `.weight`; empty: there is none."""

    path: str
    """Where the layers are, with `{}` for their number."""
    mixer_norm: str
    qkv: tuple[str, ...]
    """One for all, or one each."""
    output: str
    mlp_norm: str
    up: tuple[str, ...]
    """Two if the feed-forward block is gated: the gate first."""
    down: str
    after_mixer: str = ""
    after_mlp: str = ""
    head_norms: tuple[str, ...] = ()
    """The norms of queries and keys."""

    @property
    def gguf_names(self) -> dict[str, str]:
        """The names in GGUF files → these."""
        qkv = ("attn_qkv",) if len(self.qkv) == 1 else ("attn_q", "attn_k", "attn_v")
        up = ("ffn_up",) if len(self.up) == 1 else ("ffn_gate", "ffn_up")
        ends = {"attn_out": self.output, "ffn_down": self.down}
        norms = {"ln1": self.mixer_norm, "ln2": self.mlp_norm}
        norms |= {"attn_post_norm": self.after_mixer, "ffn_post_norm": self.after_mlp}
        norms |= dict(zip(("attn_q_norm", "attn_k_norm"), self.head_norms, strict=False))
        inputs = dict(zip((*qkv, *up), (*self.qkv, *self.up), strict=True))
        return {gguf: hub for gguf, hub in {**inputs, **ends, **norms}.items() if hub}


QWEN: Final = TowerLayer(
    "model.visual.blocks.{}", "norm1", ("attn.qkv",), "attn.proj", "norm2", ("mlp.linear_fc1",), "mlp.linear_fc2"
)
PIXTRAL: Final = TowerLayer(
    "model.vision_tower.transformer.layers.{}",
    "attention_norm",
    ("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    "attention.o_proj",
    "ffn_norm",
    ("feed_forward.gate_proj", "feed_forward.up_proj"),
    "feed_forward.down_proj",
)
SIGLIP: Final = TowerLayer(
    "model.vision_tower.encoder.layers.{}",
    "layer_norm1",
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.out_proj",
    "layer_norm2",
    ("mlp.fc1",),
    "mlp.fc2",
)
GEMMA4: Final = TowerLayer(
    "model.vision_tower.encoder.layers.{}",
    "input_layernorm",
    ("self_attn.q_proj.linear", "self_attn.k_proj.linear", "self_attn.v_proj.linear"),
    "self_attn.o_proj.linear",
    "pre_feedforward_layernorm",
    ("mlp.gate_proj.linear", "mlp.up_proj.linear"),
    "mlp.down_proj.linear",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
    ("self_attn.q_norm", "self_attn.k_norm"),
)
