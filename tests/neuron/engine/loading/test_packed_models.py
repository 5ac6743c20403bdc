"""Models whose weights stay quantised generate what the dequantised weights generate: every GGUF format in one file,
and dense weights that are quantised as they are loaded. On a CPU the packed products run as their references.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading import loading
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.kernels.layouts import MatrixLayout
from cortex.neuron.models.packing import MatrixDevice, choose_layouts

HIDDEN, INNER, VOCAB, HEADS, KV_HEADS, HEAD_DIM = 256, 512, 320, 4, 2, 64
LAYERS = (
    (Kind.Q4_K, Kind.Q6_K, Kind.Q5_K, Kind.Q4_0, Kind.Q4_1),
    (Kind.Q3_K, Kind.Q2_K, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0),
    (Kind.IQ4_NL, Kind.IQ4_XS, Kind.BF16, Kind.Q6_K, Kind.F16),
)
"""Formats of q and k, v, o, gate and up, and down in each layer."""
SCALES: dict[Kind, tuple[tuple[int, float], ...]] = {
    Kind.Q4_0: ((0, 0.01),),
    Kind.Q4_1: ((0, 0.01), (2, -0.08)),
    Kind.Q5_0: ((0, 0.005),),
    Kind.Q5_1: ((0, 0.005), (2, -0.08)),
    Kind.Q8_0: ((0, 5e-4),),
    Kind.Q2_K: ((80, 4e-3), (82, 4e-3)),
    Kind.Q3_K: ((108, 1.5e-3),),
    Kind.Q4_K: ((0, 3e-4), (2, 1.5e-3)),
    Kind.Q5_K: ((0, 1.5e-4), (2, 1.5e-3)),
    Kind.Q6_K: ((208, 3e-5),),
    Kind.IQ4_NL: ((0, 6e-4),),
    Kind.IQ4_XS: ((0, 3e-5),),
}
"""Where a block has its float16 scales, and a size for them that gives weights around 0.05."""


def random_tensor(kind: Kind, rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    if kind in (Kind.F16, Kind.BF16):
        values = random.normal(0, 0.05, (rows, columns)).astype(np.float32)
        return gguf.quants.quantize(values, kind)
    elements, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    count = rows * columns // elements
    blocks = random.integers(0, 256, (count, num_bytes), dtype=np.uint8)
    for at, size in SCALES[kind]:
        scales = (random.random(count) * size + size).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(count, 2)
    return blocks.reshape(rows, -1)


@pytest.fixture(scope="module")
def every_format(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "every-format.gguf"
    random = np.random.default_rng(0)
    writer: Any = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(len(LAYERS))
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(VOCAB)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(VOCAB)])
    writer.add_token_merges([])
    writer.add_token_types([1] * VOCAB)

    def add(name: str, kind: Kind, rows: int, columns: int) -> None:
        writer.add_tensor(f"{name}.weight", random_tensor(kind, rows, columns, random), raw_dtype=kind)

    def add_norm(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", (random.random(size) + 0.5).astype(np.float32))

    add("token_embd", Kind.Q6_K, VOCAB, HIDDEN)
    add("output", Kind.Q8_0, VOCAB, HIDDEN)
    add_norm("output_norm", HIDDEN)
    for index, (qk, v, o, gate_up, down) in enumerate(LAYERS):
        block = f"blk.{index}"
        add_norm(f"{block}.attn_norm", HIDDEN)
        add_norm(f"{block}.ffn_norm", HIDDEN)
        add_norm(f"{block}.attn_q_norm", HEAD_DIM)
        add_norm(f"{block}.attn_k_norm", HEAD_DIM)
        add(f"{block}.attn_q", qk, HEADS * HEAD_DIM, HIDDEN)
        add(f"{block}.attn_k", qk, KV_HEADS * HEAD_DIM, HIDDEN)
        add(f"{block}.attn_v", v, KV_HEADS * HEAD_DIM, HIDDEN)
        add(f"{block}.attn_output", o, HIDDEN, HEADS * HEAD_DIM)
        add(f"{block}.ffn_gate", gate_up, INNER, HIDDEN)
        add(f"{block}.ffn_up", gate_up, INNER, HIDDEN)
        add(f"{block}.ffn_down", down, HIDDEN, INNER)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def packing_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offers packing on a CPU, too, where it is not worth it outside of tests."""

    def offer(tensors: Any, spec: LoadSpec, device: torch.device) -> dict[str, MatrixLayout]:
        return choose_layouts(MatrixDevice("cuda", "bfloat16"), tensors, None) if spec.dtype == "auto" else {}

    monkeypatch.setattr(loading, "matrix_layouts", offer)


def first_tokens(
    path: Path, dtype: Any, prompts: Sequence[tuple[int, ...]]
) -> tuple[int, dict[str, tuple[int, float]]]:
    """The bytes of the weights, and each request's first token with its log-probability."""
    spec = LoadSpec(str(path), dtype=dtype, max_num_seqs=4, memory_bytes=256 << 20)
    engine = Engine(loading.load_model(spec, torch.device("cpu"), lambda *_: None, lambda: False), spec)
    engine.warm_up()
    for number, prompt in enumerate(prompts):
        engine.submit(EngineRequest(str(number), prompt, 1, SamplingParams(temperature=0.0, top_logprobs=1)))
    found: dict[str, tuple[int, float]] = {}
    while engine.has_work:
        for output in engine.step():
            if output.tokens:
                assert output.logprobs is not None
                found[output.request_id] = (output.tokens[0], output.logprobs[0].logprob)
    return engine.info.weight_bytes, found


@pytest.mark.usefixtures("packing_everywhere")
def test_packed_gguf_of_every_format_generates_what_the_dequantised_one_does(every_format: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    prompts = [tuple(torch.randint(0, VOCAB, (size,), generator=generator).tolist()) for size in (3, 40)]
    packed_bytes, packed = first_tokens(every_format, "auto", prompts)
    dense_bytes, dense = first_tokens(every_format, "float32", prompts)
    assert packed_bytes < 0.45 * dense_bytes
    for request, (token, logprob) in dense.items():
        assert packed[request][0] == token
        assert packed[request][1] == pytest.approx(logprob, abs=0.1)
