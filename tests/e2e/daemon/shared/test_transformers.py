"""A model that has no family here, in a real neuron: the worker runs the library's modules, the daemon does not."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import transformers

if TYPE_CHECKING:
    from ..conftest import Daemon

pytestmark = pytest.mark.e2e


def test_model_of_the_library_is_loaded_responds_sleeps_and_wakes(daemon: Daemon, tiny_model: Path) -> None:
    folder = tiny_model.with_name("neox")
    vocab = json.loads((tiny_model / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.GPTNeoXConfig(vocab_size=vocab, max_position_embeddings=256, eos_token_id=None, **sizes)
    transformers.GPTNeoXForCausalLM(config).save_pretrained(folder)
    shutil.copy(tiny_model / "tokenizer.json", folder)
    model_id = "neox"
    status, loaded = daemon.call("/models/load", {"model_id": model_id, "source": str(folder), "wait": True})
    assert status == 200, loaded
    assert (loaded["state"], loaded["family"], loaded["backend"]) == ("ready", "gpt_neox", "transformers")
    assert any("GPTNeoXForCausalLM" in note for note in loaded["capabilities"]["notes"])
    status, first = daemon.complete(model_id)
    assert status == 200, first
    daemon.call("/models/unload", {"model_id": model_id, "sleep": True})
    assert daemon.complete(model_id)[1]["choices"] == first["choices"]
    folder = tiny_model.with_name("diff_llama")
    sizes |= {"num_key_value_heads": 2, "vocab_size": vocab, "max_position_embeddings": 256}
    transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**sizes)).save_pretrained(folder)
    shutil.copy(tiny_model / "tokenizer.json", folder)
    status, reply = daemon.call("/models/load", {"model_id": "diff", "source": str(folder), "wait": True})
    assert (status, reply["error"]["code"]) == (422, "model_unsupported"), reply
    maps = Path(f"/proc/{daemon.process.pid}/maps").read_text()
    assert "libtorch" not in maps
    daemon.call("/models/unload", {"model_id": model_id})
