"""Benchmarks pictures in prompts: random weights of Qwen3.5-9B's shape, with its vision tower, on one GPU.

    PYTHONPATH=src python bench/vision.py --json vision.json

Three results. The time to the first token of a prompt that is one picture of 1,024 × 1,024 pixels (1,024 tokens) and a
question, against that of as many text tokens. The tower over sixteen such pictures, in floating-point operations of its
matrices and its attention, against the limit of bf16 products measured in the same run. And the same prompt again,
whose vectors and pages are cached, and the same picture with another question.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from cortex.neuron.engine.engine import Engine
from cortex.neuron.engine.loading.loading import build_model
from cortex.neuron.engine.request import EngineRequest, LoadSpec, SamplingParams
from cortex.neuron.layers.parameters import Parameters
from cortex.neuron.models.towers.tower import PixelGrid, Tower
from cortex.neuron.pictures.picture import Picture, PictureGrid
from engine import matrix_limit
from shapes import SHAPES
from workloads import weights_read

GREEDY = SamplingParams(temperature=0.0)
SIDE, QUESTION_TOKENS, NUM_PICTURES, ROUNDS = 1024, 33, 16, 9
TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "hidden_act": "gelu_pytorch_tanh",
}


def vision_engine(shape: str, device: torch.device) -> Engine:
    text = {**SHAPES[shape], "mrope_section": [11, 11, 10]}
    text["rope_parameters"] = {
        "rope_type": "default",
        "rope_theta": text.get("rope_theta", 1e7),
        "partial_rotary_factor": text.get("partial_rotary_factor", 0.25),
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    }
    config = {
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": TOWER | {"out_hidden_size": text["hidden_size"]},
        "tie_word_embeddings": False,
    }

    def fill(parameters: Parameters) -> None:
        for binding in parameters.bindings:
            view = binding.destination
            view.normal_(1.0, 0.1) if view.dim() == 1 else view.normal_(0.0, view.shape[-1] ** -0.5)

    spec = LoadSpec("", context_tokens=8192, max_num_seqs=32)
    engine = Engine(build_model(config, spec, device, fill), spec)
    engine.warm_up()
    while engine.prepare():
        pass
    return engine


class Bench:
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._generator = torch.Generator().manual_seed(0)
        self._number = 0

    def picture(self, at: int) -> Picture:
        side = SIDE // 32
        pixels = torch.randint(0, 256, (SIDE * SIDE * 3,), dtype=torch.uint8, generator=self._generator)
        self._number += 1
        grid = PictureGrid(side, side, side * side, SIDE, SIDE)
        return Picture(at, grid, self._number.to_bytes(16, "little"), pixels.numpy().tobytes())

    def text(self, count: int) -> tuple[int, ...]:
        return tuple(torch.randint(0, 100_000, (count,), generator=self._generator).tolist())

    def first_token_s(self, prompt: tuple[int, ...], pictures: tuple[Picture, ...] = ()) -> float:
        self._number += 1
        request = EngineRequest(str(self._number), prompt, 1, GREEDY, pictures=pictures)
        torch.cuda.synchronize()
        start = time.perf_counter()
        self.engine.submit(request)
        while self.engine.has_work:
            self.engine.step()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    def with_picture(self) -> tuple[tuple[int, ...], tuple[Picture, ...]]:
        picture = self.picture(0)
        return (100,) * picture.grid.num_tokens + self.text(QUESTION_TOKENS), (picture,)

    def tower_s(self, tower: Tower) -> float:
        """The tower's time for all pictures, in the passes that the engine makes."""
        pictures = [PixelGrid(each.grid, each.pixels) for each in (self.picture(0) for _ in range(NUM_PICTURES))]
        together = 16_384 // tower.num_patches(pictures[0])
        torch.cuda.synchronize()
        start = time.perf_counter()
        for first in range(0, NUM_PICTURES, together):
            tower(pictures[first : first + together])
        torch.cuda.synchronize()
        return time.perf_counter() - start


def tower_flops(tower: Tower) -> float:
    """Operations for one picture: matrices and attention, two for each multiplication with addition."""
    config, patches = tower.config, (SIDE // tower.config.patch) ** 2
    layer = 4 * config.hidden**2 + 2 * config.hidden * config.inner + 2 * patches * config.hidden
    width = config.hidden * config.merge**2
    merger = (patches // config.merge**2) * (width**2 + width * config.out)
    return 2.0 * (config.layers * patches * layer + patches * config.patch_values * config.hidden + merger)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3.5-9b", choices=[name for name in SHAPES if "3.5" in name])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    engine = vision_engine(options.model, device)
    bench, tower = Bench(engine), engine.model.tower
    assert tower is not None
    print(weights_read(engine.info))
    num_tokens = (SIDE // 32) ** 2 + QUESTION_TOKENS
    for _ in range(3):
        bench.first_token_s(bench.text(num_tokens))
        bench.first_token_s(*bench.with_picture())
    texts = [bench.first_token_s(bench.text(num_tokens)) for _ in range(ROUNDS)]
    prompts = [bench.with_picture() for _ in range(ROUNDS)]
    pictures = [bench.first_token_s(*prompt) for prompt in prompts]
    again = [bench.first_token_s(*prompts[-1]) for _ in range(ROUNDS)]
    tokens, shown = prompts[-1]
    others = [
        bench.first_token_s(tokens[:-QUESTION_TOKENS] + bench.text(QUESTION_TOKENS), shown) for _ in range(ROUNDS)
    ]
    bench.tower_s(tower)
    tower_s = statistics.median(bench.tower_s(tower) for _ in range(ROUNDS))
    limit = matrix_limit(device)
    flops = NUM_PICTURES * tower_flops(tower) / tower_s
    results = {
        "text ms": statistics.median(texts) * 1e3,
        "picture ms": statistics.median(pictures) * 1e3,
        "picture / text": statistics.median(pictures) / statistics.median(texts),
        "same picture again ms": statistics.median(again) * 1e3,
        "with another question ms": statistics.median(others) * 1e3,
        f"tower ms, {NUM_PICTURES} pictures": tower_s * 1e3,
        "tower TFLOP/s": flops / 1e12,
        "limit TFLOP/s": limit / 1e12,
        "tower of limit": flops / limit,
    }
    for name, value in results.items():
        print(f"{name:32} {value:10.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
