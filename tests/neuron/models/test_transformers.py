"""Architectures that the `transformers` library runs, on our weights, pages and batches, against the library alone."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.errors import LoadError
from cortex.neuron.engine.loading.loading import build_model, load_model
from cortex.neuron.engine.memory.sequences import KVCache
from cortex.neuron.engine.request import RankSpec
from cortex.neuron.kernels.quantised.recipes import RECIPES
from cortex.neuron.layers.configs import Shard
from cortex.neuron.models.config import UnsupportedModel
from cortex.neuron.models.packing import MatrixDevice, choose_layouts
from cortex.neuron.models.registry import open_model, read_architecture
from cortex.neuron.models.sizes import WeightStorage, kv_bytes_per_token, weight_bytes
from cortex.neuron.models.transformers import library

from ...waiting import WAIT_S
from ..engine.parallel.test_logits import logits_of
from ..engine_runs import responses
from .driver import CPU, PROMPT_TOKENS, Driver, assert_parity, continued, some_tokens, spec
from .transformers_models import CASES, TABLE, reference_of

WHOLE = ("gpt2", "gpt_bigcode", "granitemoe", "olmoe", "opt", "persimmon", "phimoe")
"""Those whose linear layers the library has no plan to divide."""
DIVIDED = [family for family in TABLE if family not in WHOLE]


@pytest.mark.parametrize(("family", "name"), CASES)
@torch.inference_mode()
def test_every_logit_matches_the_library(family: str, name: str, tmp_path: Path) -> None:
    """For a prompt that is computed whole, in chunks that do not fit pages, token by token, and with another one. And
    the sizes that a node computes without torch are those of the loaded model."""
    reference = reference_of(family, name)
    reference.save_pretrained(tmp_path)
    loaded = load_model(spec(tmp_path), CPU, lambda *_: None, lambda: False)
    tokens, other = some_tokens(PROMPT_TOKENS), some_tokens(40, seed=1)
    expected = reference(tokens[None]).logits[0]
    (whole,) = Driver(loaded.model, 1).logits([tokens], [[PROMPT_TOKENS]])
    assert_parity(whole, expected)
    cut, second = Driver(loaded.model, 2).logits([tokens, other], [[31, 1, 2, 30, 1, 1, 1, 8], [1, 38, 1]])
    assert_parity(cut, expected)
    assert_parity(second, reference(other[None]).logits[0])
    checkpoint, described = open_model(tmp_path)
    checkpoint.close()
    assert weight_bytes(described, WeightStorage(4, tensors=checkpoint.tensors)) == loaded.model.parameters.num_bytes
    windows = dict.fromkeys(loaded.model.architecture.windows, 1)
    assert (
        kv_bytes_per_token(described, 4) == KVCache(loaded.model.attentions, windows, 1, torch.float32, CPU).num_bytes
    )
    assert any(reference.__class__.__name__ in note for note in loaded.notes)


@pytest.mark.parametrize(("family", "name"), [("gpt_neox", "parallel"), ("gemma2", "caps"), ("mixtral", "window")])
@torch.inference_mode()
def test_engine_matches_generate_of_the_library_also_after_a_sleep(family: str, name: str, tmp_path: Path) -> None:
    """Prompts longer than a chunk, prefilled together with rows that decode, again from the prefix cache, and after
    the weights have left their place and come back."""
    reference = reference_of(family, name)
    reference.save_pretrained(tmp_path)
    options = spec(tmp_path, prefill_chunk_tokens=20)
    engine = Engine(load_model(options, CPU, lambda *_: None, lambda: False), options, moves_weights=True)
    engine.warm_up()
    prompts = [some_tokens(count, seed=count).tolist() for count in (5, 90, 91)]
    expected = [continued(reference, prompt) for prompt in prompts]
    for _ in range(2):
        assert responses(engine, prompts) == expected
    engine.sleep()
    engine.wake(lambda *_: None)
    assert responses(engine, prompts) == expected
    engine.close()


@pytest.mark.parametrize("family", DIVIDED)
def test_logits_of_two_ranks_equal_those_of_one_device(family: str, tmp_path: Path) -> None:
    path, directory = tmp_path / "model", tmp_path / "group"
    reference_of(family, next(iter(TABLE[family].changes))).save_pretrained(path)
    whole_bytes: list[int] = []
    expected = logits_of(path, on_read=whole_bytes.append)
    directory.mkdir()
    read_bytes: list[int] = []
    ranks = [RankSpec(rank, 2, str(directory)) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for logits in pool.map(partial(logits_of, path, on_read=read_bytes.append), ranks):
            assert (logits - expected).abs().max() < 1e-5 * expected.abs().max().clamp(min=1)
    assert 0 < max(read_bytes) < max(whole_bytes)


@pytest.mark.parametrize("family", ["gpt2", "olmoe"])
def test_model_that_cannot_be_divided_is_rejected_before_its_weights_are_read(family: str, tmp_path: Path) -> None:
    reference_of(family, "plain").save_pretrained(tmp_path)
    _, architecture = open_model(tmp_path)
    with pytest.raises(UnsupportedModel, match="no plan to divide the linear layers of"):
        architecture.sharded(Shard(0, 2))
    with pytest.raises(UnsupportedModel, match="cannot be on a device of their own"):
        architecture.staged(range(1))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "diffllama"}, "uses the attention of a layer more than once"),
        ({"model_type": "doge"}, "DogeAttention has attention that is not causal, or has a mask of its own"),
        ({"model_type": "electra", "is_decoder": False}, "neither causal nor a window"),
        ({"num_local_experts": "many"}, "MixtralForCausalLM of the transformers library rejects the model's config"),
        ({"num_hidden_layers": 1}, "is this the config of these weights"),
        ({"num_hidden_layers": 3}, "has no tensor 'model.layers.2"),
        ({"num_local_experts": 9}, "has 9 parts, but the checkpoint has 6 of"),
        ({"hidden_size": 64}, "gives the shape|needs|is this the model"),
        ({"model_type": "ctrl", "max_position_embeddings": 1 << 34}, "GB besides the weights, which is not supported"),
    ],
)
def test_rejects_what_the_modules_need_and_is_not_implemented_by_name(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    reference_of("mixtral", "plain").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(LoadError, match=reason):
        load_model(spec(tmp_path), CPU, lambda *_: None, lambda: False)


def test_linear_layers_stay_quantised(tmp_path: Path) -> None:
    """As on a GPU, whose kernels run interpreted elsewhere: here it is checked which matrices are, and their sizes."""
    reference_of("gpt_neox", "wide").save_pretrained(tmp_path)
    checkpoint, architecture = open_model(tmp_path)
    layouts = choose_layouts(MatrixDevice("cuda", "bfloat16"), checkpoint.tensors, RECIPES["q8_0"])
    loaded = build_model(checkpoint.config, spec(tmp_path), CPU, lambda _: None, layouts, tensors=checkpoint.tensors)
    checkpoint.close()
    quantised = {binding.source for binding in loaded.model.parameters.packed_bindings}
    assert quantised == {
        *(
            f"gpt_neox.layers.{index}.{name}.weight"
            for index in range(2)
            for name in ("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
        ),
        "embed_out.weight",
    }
    storage = WeightStorage(4, packing=layouts, tensors=checkpoint.tensors)
    assert (
        weight_bytes(architecture, storage)
        == loaded.model.parameters.num_bytes
        < weight_bytes(architecture, WeightStorage(4, tensors=checkpoint.tensors))
    )


def test_error_without_the_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library_version", lambda: None)
    library.library_model.cache_clear()
    with pytest.raises(UnsupportedModel, match=r"pip install '\.\[neuron,transformers\]'"):
        read_architecture({"model_type": "gpt_neox"})


def test_model_is_described_without_importing_torch_or_the_library() -> None:
    code = """
import sys
sys.modules["torch"] = None
from cortex.neuron.models.registry import read_architecture
described = read_architecture({"model_type": "gpt_neox", "num_hidden_layers": 6, "num_attention_heads": 8})
assert described.config.num_layers == 6 and described.config.kv_heads == 8 and described.config.hidden == 6144
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=WAIT_S)
