"""Whole models in published quantised formats against the reference library with the dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.neuron.models.driver import Driver
from tests.neuron.weights.safetensors.test_published import words
from torch import Tensor

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading import loading
from cortex.neuron.engine.memory.plan import ModelSizes
from cortex.neuron.engine.parallel.group import TorchGroup
from cortex.neuron.engine.request import EngineRequest, LoadSpec, RankSpec, SamplingParams, StageSpec
from cortex.neuron.kernels.dense.matrix import DenseMatrix
from cortex.neuron.kernels.matrix import StackedMatrix
from cortex.neuron.kernels.quantised.layout import INT4, Q8, OrderedLayout
from cortex.neuron.kernels.quantised.matrix import OrderedMatrix, PackedMatrix
from cortex.neuron.layers.feed_forward import MLP
from cortex.neuron.models.decoder import Decoder
from cortex.neuron.models.packing import MatrixDevice, choose_layouts
from cortex.neuron.node.inspection_process.preflight import inspect
from cortex.wire.errors import LoadFailed

from ...engine_runs import run, tokens_of
from ...rank_threads import RankThreads
from ...tiny_models import tiny_sizes

CPU = torch.device("cpu")
GPU = MatrixDevice("cuda", "bfloat16")
VOCAB = 96


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """[outputs, inputs] → the parts of the matrix by suffix, and the values that they mean."""
    grouped = weight.view(len(weight), -1, 64)
    low, high = grouped.amin(-1, keepdim=True), grouped.amax(-1, keepdim=True)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(0, 15)
    codes = (grouped / scale + zero).round().clamp(0, 15)
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def packed(rows: Tensor) -> Tensor:
        return words(rows.reshape(len(rows), -1, 8)[..., order].flatten(1).int(), 4)

    parts = {
        "qweight": packed(codes.flatten(1).t()),
        "qzeros": packed(zero[..., 0].t()),
        "scales": scale[..., 0].t().half().contiguous(),
    }
    return parts, ((codes - zero) * scale).flatten(1)


def gptq(weight: Tensor, *, has_order: bool = True, number: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """`has_order`: columns in an order of their own, the same for all matrices of as many with this number."""
    columns = weight.shape[1]
    order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns + number))
    order = order if has_order else torch.arange(columns)
    group_of = torch.empty(columns, dtype=torch.int32)
    group_of[order] = torch.arange(columns, dtype=torch.int32) // 64
    grouped = weight[:, order].view(len(weight), -1, 64)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = ((high - low) / 15).half().float()
    zero = (-low / scale).round().clamp(1, 15)
    codes = (weight / scale[:, group_of] + zero[:, group_of]).round().clamp(0, 15)
    parts = {
        "qweight": words(codes.int(), 4).t().contiguous(),
        "qzeros": words((zero.int() - 1).t(), 4),
        "scales": scale.t().half().contiguous(),
        "g_idx": group_of,
    }
    return parts, (codes - zero[:, group_of]) * scale[:, group_of]


def float8(weight: Tensor, size: int = 64) -> tuple[dict[str, Tensor], Tensor]:
    """`size`: rows and columns of a block, which need not divide the rows; 0: a row has one scale."""
    rows, columns = size or 1, size or weight.shape[1]
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % rows))
    blocks = padded.view(len(padded) // rows, rows, -1, columns)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    values = (codes.float() * scale[:, None, :, None]).view(padded.shape)[: len(weight)]
    name = "weight_scale_inv" if size else "weight_scale"
    return {"weight": codes.view(padded.shape)[: len(weight)].contiguous(), name: scale}, values


Quantise = Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]
FORMATS: dict[str, tuple[dict[str, Any], Quantise]] = {
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True}, gptq),
    "fp8": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, float8),
    "fp8 in blocks of 128": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, partial(float8, size=128)),
    "fp8 by row": ({"quant_method": "compressed-tensors"}, partial(float8, size=0)),
}


@pytest.fixture(scope="module", params=FORMATS)
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model directory, and the reference model with the values that are in it."""
    path = tmp_path_factory.mktemp(request.param)
    return path, write(path, *FORMATS[request.param])


def write(path: Path, config: dict[str, Any], quantise: Quantise, inner: int = 256) -> Any:
    """Returns the reference model."""
    torch.manual_seed(0)
    sizes = transformers.Qwen3Config(
        **tiny_sizes(vocab_size=VOCAB, hidden_size=128, intermediate_size=inner), tie_word_embeddings=False
    )
    reference = transformers.Qwen3ForCausalLM(sizes).eval()
    for parameter in reference.parameters():
        torch.nn.init.normal_(parameter, std=0.5 if parameter.dim() == 1 else 0.15)
    reference.save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    dense = dict(reference.named_parameters())
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        parts, values = quantise(tensors.pop(name))
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in parts.items()}
        dense[name].data.copy_(values)
    save_file(tensors, path / "model.safetensors")
    stored = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(stored | {"quantization_config": config}))
    return reference


def loaded(path: Path, group: TorchGroup | None = None, rank: RankSpec | None = None) -> Decoder:
    spec = LoadSpec(str(path), dtype="float32", context_tokens=128, max_num_seqs=4, rank=rank)
    return loading.load_model(spec, CPU, lambda *_: None, lambda: False, group).model


@torch.inference_mode()
def logits_of(path: Path, rank: RankSpec | None = None) -> Tensor:
    """Logits of every position of a prompt in two chunks."""
    group = None if rank is None else TorchGroup.join(rank, CPU, lambda: None)
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(5))
    [logits] = Driver(loaded(path, group, rank), 1).logits([tokens], [[33, 7]])
    if group is not None:
        group.close()
    return logits


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
def test_published_model_agrees_with_the_reference_on_its_values(
    published: tuple[Path, Any], is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reference = published
    if is_packed:
        monkeypatch.setattr(loading, "matrix_layouts", lambda tensors, *_: choose_layouts(GPU, tensors, None))
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(5))
    model = loaded(path)
    [logits] = Driver(model, 1).logits([tokens], [[33, 7]])
    with torch.no_grad():
        expected = reference(tokens[None]).logits[0]
    error = ((logits - expected).norm() / expected.norm()).item()
    assert error < 0.02 if is_packed else error < 0.008  # scales are rounded to bfloat16; some FP8 to eight-bit groups
    dense = [layer.mlp for layer in model.layers if isinstance(layer.mlp, MLP)]
    assert len(dense) == len(model.layers)
    assert any(not isinstance(mlp.down.matrix, DenseMatrix) for mlp in dense) == is_packed


def with_indices(path: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    """Changes the groups of the columns of each matrix, by its name; its values then differ."""
    tensors = load_file(path / "model.safetensors")
    save_file(
        {name: change(name, part) if name.endswith("g_idx") else part for name, part in tensors.items()},
        path / "model.safetensors",
    )


@pytest.mark.parametrize("are_alike", [True, False])
def test_columns_in_another_order_stay_in_four_bits_without_rounding(
    tmp_path: Path, are_alike: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the same input, matrices with the same order are one matrix. Down needs none: the rows before it have it."""
    write(tmp_path, *FORMATS["gptq"])
    if not are_alike:
        with_indices(tmp_path, lambda _, groups: groups[torch.randperm(len(groups))])
    expected = logits_of(tmp_path)
    monkeypatch.setattr(loading, "matrix_layouts", lambda tensors, *_: choose_layouts(GPU, tensors, None))
    model = loaded(tmp_path)
    tokens = torch.randint(0, VOCAB, (40,), generator=torch.Generator().manual_seed(5))
    [logits] = Driver(model, 1).logits([tokens], [[33, 7]])
    assert (logits - expected).norm() / expected.norm() < 1e-5
    for layer in model.layers:
        assert isinstance(layer.mlp, MLP)
        assert isinstance(layer.mlp.down.matrix, PackedMatrix)
        assert not isinstance(layer.mlp.down.matrix, OrderedMatrix)
        assert layer.mlp.gate_up is not None
        assert isinstance(layer.mlp.gate_up.gate_up.matrix, OrderedMatrix if are_alike else StackedMatrix)
    facts = inspect(tmp_path)
    assert facts.quant == "int4"
    planned = ModelSizes.of(facts.architecture, replace(facts.storage(GPU), item_bytes=4)).weight_bytes
    assert planned == model.parameters.num_bytes


def test_blocks_in_host_memory_take_their_inputs_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, *FORMATS["gptq"])
    monkeypatch.setattr(loading, "matrix_layouts", lambda tensors, *_: choose_layouts(GPU, tensors, None))
    spec = LoadSpec(str(tmp_path), dtype="float32", max_num_seqs=4)
    request = EngineRequest("r", tuple(range(40)), 6, SamplingParams(temperature=0.0), prompt_logprobs=0)
    found = []
    whole = loading.load_model(spec, CPU, lambda *_: None, lambda: False)
    small_bytes = whole.weight_bytes - 20_000 + whole.memory.num_bytes // 4
    for limited in (spec, replace(spec, memory_bytes=small_bytes, host_weight_bytes=1 << 30)):
        model = loading.load_model(limited, CPU, lambda *_: None, lambda: False)
        assert (model.host is None) == (limited is spec)
        engine = Engine(model, spec, moves_weights=True)
        run(engine, request)
        engine.sleep()
        engine.wake(lambda *_: None)
        found.append([each.logprob for output in run(engine, request)["r"] for each in output.prompt_logprobs])
        engine.close()
    assert found[1] == pytest.approx(found[0], abs=1e-3)


def test_order_by_group_is_no_other_order(tmp_path: Path) -> None:
    """As with static groups, which quantise columns in another order and leave their groups."""
    write(tmp_path, *FORMATS["gptq"])
    with_indices(tmp_path, lambda _, groups: groups.sort().values)
    layouts = choose_layouts(GPU, inspect(tmp_path).tensors, None)
    assert set(layouts.values()) == {INT4}


def test_groups_of_different_sizes_become_codes_of_eight_bits(tmp_path: Path) -> None:
    write(tmp_path, *FORMATS["gptq"])
    with_indices(tmp_path, lambda name, groups: groups.clamp(max=0) if "q_proj" in name else groups)
    layouts = choose_layouts(GPU, inspect(tmp_path).tensors, None)
    assert {layout for name, layout in layouts.items() if "q_proj" in name} == {Q8}


def test_block_with_a_norm_before_down_keeps_its_rows(tmp_path: Path) -> None:
    write(tmp_path, *FORMATS["gptq"])
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        tensors[f"model.layers.{layer}.mlp.ffn_sub_norm.weight"] = torch.ones(256)
    save_file(tensors, tmp_path / "model.safetensors")
    layouts = choose_layouts(GPU, inspect(tmp_path).tensors, None)
    assert all(isinstance(layout, OrderedLayout) for layout in layouts.values())


def test_preflight_counts_the_quantised_bytes_and_rejects_another_quantisation(published: tuple[Path, Any]) -> None:
    path, _ = published
    facts = inspect(path)
    assert facts.quant in ("int4", "fp8")
    assert (
        ModelSizes.of(facts.architecture, facts.storage(GPU)).weight_bytes
        < 0.7 * ModelSizes.of(facts.architecture, facts.storage(MatrixDevice("cpu", "bfloat16"))).weight_bytes
    )
    inspect(path, facts.quant)
    with pytest.raises(LoadFailed, match=f"is quantised as {facts.quant}, not as q6_k; name the unquantised model"):
        inspect(path, "q6_k")


@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_published_model_is_divided_within_its_layers(
    published: tuple[Path, Any], tmp_path: Path, num_ranks: int, is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = published
    inspect(path, num_ranks=num_ranks)
    if is_packed:
        monkeypatch.setattr(loading, "matrix_layouts", lambda tensors, *_: choose_layouts(GPU, tensors, None))
    expected = logits_of(path)
    ranks = [RankSpec(rank, num_ranks, str(tmp_path)) for rank in range(num_ranks)]
    with ThreadPoolExecutor(num_ranks) as pool:
        for logits in pool.map(lambda rank: logits_of(path, rank), ranks):
            if is_packed:  # where blocks of FP8 are cut, they become eight-bit groups
                assert (logits - expected).norm() / expected.norm() < 0.02
            else:
                assert (logits - expected).abs().max() < 1e-4


def test_division_that_cuts_a_group_is_rejected_before_the_load(tmp_path: Path) -> None:
    write(tmp_path, *FORMATS["awq"], inner=192)
    inspect(tmp_path, num_ranks=2)
    with pytest.raises(
        LoadFailed,
        match=r"mine cannot be divided among 4 devices: .* 192 columns in INT4, which has blocks of 32, cannot be "
        "divided after 144; use fewer devices, `pipeline_parallel`, or another quantisation",
    ):
        inspect(tmp_path, name="mine", num_ranks=4)


def test_published_model_is_divided_by_layers(published: tuple[Path, Any], tmp_path: Path) -> None:
    path, _ = published
    spec = LoadSpec(str(path), dtype="float32", context_tokens=128, max_num_seqs=4)
    greedy = SamplingParams(temperature=0.0)
    request = EngineRequest("r", tuple(range(40)), max_tokens=8, sampling=greedy, prompt_logprobs=0)
    whole = Engine.load(spec, CPU, lambda *_: None, lambda: False)
    [expected, *_] = expected_outputs = run(whole, request)["r"]
    whole.close()
    group = RankThreads([replace(spec, stages=(StageSpec(0, 1), StageSpec(1, 1)))] * 2, tmp_path)
    [found, *_] = outputs = run(group.leader, request)["r"]
    group.close()
    assert tokens_of(outputs) == tokens_of(expected_outputs)
    scores = [[each.logprob for each in output.prompt_logprobs] for output in (found, expected)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
