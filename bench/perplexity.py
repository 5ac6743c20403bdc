"""What quantised weights, rounded inputs and an eight-bit KV cache cost in quality: log-probabilities of a fixed text,
next to the model as it is stored.

    PYTHONPATH=src python bench/perplexity.py model.gguf --llama PYTHON_WITH_LLAMA_CPP
    PYTHONPATH=src python bench/perplexity.py MODEL_DIRECTORY --device cuda --dtype bfloat16

The text is this project's LICENSE, or `--text FILE`. It is scored in windows, each without what is before it. Each row
has the perplexity, and how far the log-probabilities of the tokens are from those of the first row: mean, 95th
percentile and largest difference, in nats. `as served` is the model as a node loads it: on a CPU its products take
quantised inputs. On a GPU the recipes are loaded as a node loads them. On a CPU the matrices of the dense model get the
values that the packed ones have, which are the same. Give `--dtype float32` on a CPU, so that only the weights differ.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading.loading import build_model, load_model
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.kernels.layouts import MatrixLayout
from cortex.neuron.kernels.quantised.recipes import RECIPES
from cortex.neuron.kernels.storages import empty_matrix
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.packing import QUANTISABLE, MatrixDevice, choose_layouts
from cortex.neuron.text.tokenizer.library import LibraryTokenizer
from cortex.neuron.weights.checkpoint import Checkpoint, open_checkpoint
from cortex.neuron.weights.transfer import Placement, load_into

TEXT = Path(__file__).parent.parent / "LICENSE"
CHUNK_TOKENS = 64
"""Tokens computed at once: later ones read the keys and values of earlier ones from the cache."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file or a model directory")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--window", type=int, default=512, help="tokens of a window")
    parser.add_argument("--windows", type=int, default=8, help="at most this many windows are scored")
    parser.add_argument("--llama", help="a Python with llama-cpp-python: score the file with llama.cpp too")
    parser.add_argument("--only", nargs="*", help="score these of the rows only")
    arguments = parser.parse_args()
    tokens = LibraryTokenizer.load(arguments.model).encode(arguments.text.read_text())
    starts = range(0, len(tokens) - 1, arguments.window)[: arguments.windows]
    windows = [tuple(tokens[start : start + arguments.window]) for start in starts]
    print(f"{sum(map(len, windows))} tokens in {len(windows)} windows, {arguments.device}, {arguments.dtype}")
    spec = LoadSpec(
        str(arguments.model),
        dtype=arguments.dtype,
        context_tokens=arguments.window + 16,
        max_num_seqs=1,
        prefill_chunk_tokens=CHUNK_TOKENS,
    )
    device = torch.device("cuda:0" if arguments.device == "cuda" else arguments.device)
    rows = {"as stored": spec, "as served": replace(spec, dtype="auto"), "kv fp8": replace(spec, kv_dtype="fp8")}
    rows |= {name: replace(spec, quant=name) for name in reversed(RECIPES)}
    baseline: Tensor | None = None
    for name, row in rows.items():
        if arguments.only and name not in arguments.only and baseline is not None:
            continue
        scores = _all_scores(row, device, windows)
        baseline = scores if baseline is None else baseline
        print(table_row(name, scores, baseline), flush=True)
    if arguments.llama and baseline is not None:
        peer = subprocess.run(
            [arguments.llama, Path(__file__).with_name("llama_scores.py"), arguments.model],
            input=json.dumps(windows),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        print(table_row("llama.cpp", torch.tensor(json.loads(peer.stdout)), baseline))


def table_row(name: str, scores: Tensor, baseline: Tensor) -> str:
    found, expected = (float((-each.mean()).exp()) for each in (scores, baseline))
    difference = (scores - baseline).abs()
    mean, p95, largest = (float(each) for each in (difference.mean(), difference.quantile(0.95), difference.max()))
    return f"{name:10} {found:9.4f} {found / expected - 1:+8.2%}  {mean:8.4f} {p95:8.4f} {largest:8.4f}"


def _all_scores(spec: LoadSpec, device: torch.device, windows: Sequence[tuple[int, ...]]) -> Tensor:
    engine = load(spec, device)
    scores = torch.tensor([score for window in windows for score in _scores(engine, window)])
    del engine  # it has taken what was free on the device
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return scores


def _scores(engine: Engine, window: tuple[int, ...]) -> Iterator[float]:
    """The log-probability of every token after the first."""
    engine.submit(EngineRequest("window", window, 1, SamplingParams(temperature=0.0), prompt_logprobs=0))
    while engine.has_work:
        for output in engine.step():
            yield from (score.logprob for score in output.prompt_logprobs)


def load(spec: LoadSpec, device: torch.device) -> Engine:
    if device.type == "cuda" or spec.quant is None:
        return Engine(load_model(spec, device, lambda *_: None, lambda: False), spec)
    checkpoint = open_checkpoint(Path(spec.path))
    recipe = RECIPES[spec.quant]
    # A quantised file is treated as if it were dense: what the recipe does to its values is the question.
    dense = {
        name: replace(info, dtype=info.dtype if info.dtype in QUANTISABLE else "F32")
        for name, info in checkpoint.tensors.items()
    }
    layouts = choose_layouts(MatrixDevice("cuda", "bfloat16"), dense, recipe)
    loaded = build_model(
        checkpoint.config,
        replace(spec, quant=None),
        device,
        lambda parameters: fill(parameters, checkpoint, layouts),
    )
    return Engine(loaded, replace(spec, quant=None))


def fill(parameters: Parameters, checkpoint: Checkpoint, layouts: Mapping[str, MatrixLayout]) -> None:
    """Fill a dense model with the values that packed matrices have."""
    bindings = parameters.bindings_from(checkpoint.tensors)
    placements = [Placement(binding.source, binding.destination, transform=binding.transform) for binding in bindings]
    load_into(checkpoint, placements, progress=lambda *_: None, cancelled=lambda: False)
    for binding in bindings:
        layout = layouts.get(binding.source)
        if binding.destination.dim() == 3:  # the experts of a layer, which are packed one by one
            layout = next(
                (layouts[name] for name in layouts if name.startswith(binding.source.rpartition(".")[0])), None
            )
        if layout is None or "mlp.gate." in binding.source or "shared_expert_gate" in binding.source:
            continue
        for tensor in binding.destination if binding.destination.dim() == 3 else (binding.destination,):
            matrix = empty_matrix(layout, tensor.shape[0], tensor.shape[1], tensor.device)
            matrix.put_values(0, tensor)
            tensor.copy_(matrix.values())


if __name__ == "__main__":
    main()
