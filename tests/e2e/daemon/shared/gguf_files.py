"""The tiny model of these tests as GGUF files."""

from __future__ import annotations

from pathlib import Path

import gguf
from safetensors.torch import load_file

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
END_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(path: Path, tiny: Path, quant: str, parts: int = 0) -> None:
    """The tiny model with its matrices in one format. `parts`: the number of tensors in each of several files."""
    writer = gguf.GGUFWriter(path, "llama", split_max_tensors=parts)
    writer.add_context_length(512)
    writer.add_embedding_length(64)
    writer.add_block_count(2)
    writer.add_feed_forward_length(128)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10_000.0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(number) for number in range(0x100, 0x200)])
    for name, tensor in load_file(tiny / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem in END_NAMES:
            stem = END_NAMES[stem]
        else:
            layer, part = stem.removeprefix("model.layers.").split(".", 1)
            stem = f"blk.{layer}.{LAYER_NAMES[part]}"
        kind = gguf.GGMLQuantizationType["F32" if tensor.dim() == 1 else quant]
        writer.add_tensor(f"{stem}.weight", gguf.quantize(tensor.numpy(), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
