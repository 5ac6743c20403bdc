"""What quantisation at load costs in quality: perplexity of a fixed text for each recipe, beside bfloat16 weights.

    PYTHONPATH=src python bench/quality.py model.gguf

Runs on a CPU through the reference library, with each matrix replaced by what the kernels multiply with (its packed
weights). Computes in float32, so that only the weights differ. The text is this project's LICENSE.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cortex.neuron.kernels.quantised.layout import SCALED_COLUMNS
from cortex.neuron.kernels.quantised.packing import empty_matrix, unpacked
from cortex.neuron.kernels.quantised.recipes import RECIPES, Recipe
from cortex.neuron.weights.checkpoint import open_checkpoint

TEXT = Path(__file__).parent.parent / "LICENSE"
NUM_TOKENS = 1024


def stored(name: str, weight: torch.Tensor, recipe: Recipe | None) -> torch.Tensor:
    """The weight as a load keeps it: in bfloat16 without a recipe, and where its rows are not whole groups."""
    if recipe is None or weight.dim() != 2 or weight.shape[1] % SCALED_COLUMNS:
        return weight.bfloat16().float()
    matrix = empty_matrix(recipe.layout_of(name), weight.shape[0], weight.shape[1], weight.device)
    matrix.put_numbers(0, weight)
    return unpacked(matrix)


def perplexity(model: Any, tokens: torch.Tensor) -> float:
    with torch.inference_mode():
        return float(model(tokens, labels=tokens).loss.exp())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file or a model directory")
    path = parser.parse_args().model
    checkpoint = open_checkpoint(path)
    factory: Any = AutoModelForCausalLM
    model = factory.from_config(AutoConfig.for_model(**checkpoint.config), dtype=torch.float32)
    model.load_state_dict({name: checkpoint.read(name).float() for name in checkpoint.tensors}, strict=False)
    model.eval()
    if path.suffix == ".gguf":
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    else:
        tokenizer = AutoTokenizer.from_pretrained(path)
    tokens = tokenizer(TEXT.read_text(), return_tensors="pt").input_ids[:, :NUM_TOKENS]
    original = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    baseline = 0.0
    for recipe in (None, *reversed(RECIPES.values())):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(stored(name, original[name], recipe))
        found = perplexity(model, tokens)
        baseline = baseline or found
        print(f"{recipe.name if recipe else 'bfloat16':10} {found:8.4f}  {found / baseline - 1:+.2%}", flush=True)


if __name__ == "__main__":
    main()
