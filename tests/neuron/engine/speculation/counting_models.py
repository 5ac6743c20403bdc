"""Models that count, so that drafts are often right, and requests with every option that drafts must not change."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading.loading import build_model
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.engine.speculation.drafter import Draft
from cortex.neuron.engine.speculation.width_rule import FastestWidths, StepTime
from cortex.neuron.layers.parameters import Parameters

from ...engine_runs import run, tokens_of

CPU = torch.device("cpu")
END = 256
VOCAB = 258
GRAMMAR = '{"grammars": [{"json_schema": {"type": "object", "properties": {"kind": {"enum": ["aa", "bb"]}, "n": {"type": "integer", "maximum": 99}}, "required": ["kind", "n"], "additionalProperties": false}}]}'  # noqa: E501


@dataclass(frozen=True, slots=True)
class AnyWidths(FastestWidths):
    """Checks as many draft tokens as chance says, in every kind of step, and in some steps none."""

    draw: random.Random
    max_tokens: int = 64

    def widths(self, drafts: Sequence[Draft], num_tokens: int, *, is_mixed: bool) -> list[int]:
        del num_tokens, is_mixed
        if self.draw.random() < 0.25:
            return [0] * len(drafts)
        return [self.draw.randint(0, min(12, len(draft.tokens))) for draft in drafts]

    def num_proposals(self, odds: Sequence[Sequence[float]], num_rows: int) -> int:
        del odds, num_rows
        return self.draw.choice((0, 1, 2, 3, 5))

    def record(self, step: StepTime) -> None:
        pass

    def forget(self) -> None:
        pass


def count_into(name: str, tensor: torch.Tensor) -> None:
    """Fills a tensor of the checkpoint: the token after t is mostly t + 1, also for a prediction head, which sees t and
    little else."""
    if tensor.dim() == 1:
        torch.nn.init.normal_(tensor, mean=1.0, std=0.1)
    elif "embed_tokens" in name or "lm_head" in name:
        embedding = torch.randn(VOCAB, 32, generator=torch.Generator().manual_seed(1))
        tensor.copy_(embedding if "embed" in name else 0.4 * embedding.roll(1, dims=0))
    elif name.endswith(("mtp.fc.weight", ".eh_proj.weight")):
        tensor.normal_(std=0.2)[:, :32] += 4 * torch.eye(32)
    else:
        torch.nn.init.normal_(tensor, std=0.08)


def counting(parameters: Parameters) -> None:
    torch.manual_seed(1)
    for binding in parameters.bindings:
        count_into(binding.source, binding.destination)


def save_counting(config: dict[str, Any], path: Path, folder: Path, *, has_head: bool = False) -> Path:
    """A checkpoint of the counting model. `folder` has a tokenizer."""
    tensors: dict[str, torch.Tensor] = {}

    def save(parameters: Parameters) -> None:
        torch.manual_seed(1)
        for binding in parameters.bindings:
            tensors[binding.source] = torch.empty(binding.shape or tuple(binding.destination.shape))
            count_into(binding.source, tensors[binding.source])

    shutil.copytree(folder, path)
    build_model(
        config, LoadSpec("", dtype="float32", context_tokens=64, speculation="mtp" if has_head else "off"), CPU, save
    )
    (path / "config.json").write_text(json.dumps(config))
    save_file(tensors, path / "model.safetensors")
    return path


def counted(prompt: Sequence[int]) -> tuple[int, ...]:
    """A prompt that the counting model continues, as long as another."""
    return tuple((prompt[0] + index) % 256 for index in range(len(prompt)))


def some_requests(seed: int) -> list[EngineRequest]:
    """One with each option, and one with any of them."""
    draw = random.Random(seed)
    greedy, sampled = {"temperature": 0.0}, {"temperature": 1.5, "seed": seed}
    options: list[dict[str, Any]] = [
        greedy,
        sampled,
        sampled | {"top_p": 0.8, "top_k": 20, "min_p": 0.01},
        greedy | {"frequency_penalty": 0.9, "presence_penalty": 0.5},
        sampled | {"repetition_penalty": 1.4, "repetition_window": 12},
        greedy | {"repetition_penalty": 1.6},
        greedy | {"logit_bias": ((3, 4.0), (7, -5.0))},
        sampled | {"allowed_token_ids": tuple(range(5, 90))},
        sampled | {"top_logprobs": 3},
    ]
    requests = []
    for number, sampling in enumerate([*options, greedy, sampled, greedy]):
        if number != 2:  # two choices of one prompt
            text = tuple(draw.randrange(256) for _ in range(draw.randint(1, 12)))
            prompt = text * draw.randint(1, 4)
        request = EngineRequest(str(number), prompt, draw.randint(1, 16), SamplingParams(**sampling))
        if number >= len(options):
            request = replace(request, grammar=GRAMMAR, stop_token_ids=(END,))
        elif number % 2:
            stops = tuple(draw.randrange(256) for _ in range(30))
            request = replace(request, stop_token_ids=stops, min_tokens=draw.choice((0, 6)))
        requests.append(request)
    return requests


Response = tuple[tuple[int, ...], tuple[Any, ...], str | None]


def responses(engine: Engine, requests: Sequence[EngineRequest]) -> dict[str, Response]:
    found: dict[str, Response] = {}
    for name, outputs in run(engine, *requests).items():
        assert all(output.error is None for output in outputs)
        logprobs = tuple(each for output in outputs for each in output.logprobs)
        found[name] = tuple(tokens_of(outputs)), logprobs, outputs[-1].finish
    return found
