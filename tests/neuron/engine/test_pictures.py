"""Pictures in the engine: prefix cache, batches, memory, preemption, sleep, and models that are divided."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cortex.neuron.engine.engine import RESERVED_TOKENS, Engine
from cortex.neuron.engine.errors import RequestError
from cortex.neuron.engine.execution.picture_encoder import PictureEncoder
from cortex.neuron.engine.loading.loading import load_model
from cortex.neuron.engine.request import LoadSpec, StageSpec
from cortex.neuron.engine.scheduling.picture_positions import PicturePositions, PictureSpan
from cortex.neuron.pictures.picture import Picture, PictureGrid, PictureRules

from ..engine_runs import run, tokens_of
from ..models.vision_models import Prompt, random_image, spec_of, text, write_vision_model
from ..rank_threads import RankThreads

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    write_vision_model("qwen3_vl", path)
    return path


def load(folder: Path, reserved_tokens: int = RESERVED_TOKENS, **changes: Any) -> Engine:
    options: dict[str, Any] = {"dtype": "float32", "context_tokens": 512, "max_num_seqs": 4, "speculation": "off"}
    spec = LoadSpec(str(folder), **(options | changes))
    return Engine(load_model(spec, CPU, lambda *_: None, lambda: False), spec, reserved_tokens=reserved_tokens)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    loaded = load(folder, prefill_chunk_tokens=24)
    yield loaded
    loaded.check_integrity()
    loaded.close()


def encoder_of(engine: Engine, prompts: list[Prompt], **options: Any) -> PictureEncoder:
    """An encoder with the engine's tower that knows the pictures of these prompts."""
    tower = engine.model.tower
    assert tower is not None
    encoder = PictureEncoder(tower, options.pop("pass_patches", 4096), CPU, **options)
    for prompt in prompts:
        encoder.add(prompt.pictures)
    return encoder


def vectors_of(encoder: PictureEncoder, *pictures: Picture) -> torch.Tensor:
    spans = [PictureSpan(0, each.grid.num_tokens, 0, each.key, each.grid, 0, 0) for each in pictures]
    return encoder.vectors(spans, [(0, each.grid.num_features) for each in pictures])


def said(engine: Engine, *prompts: Prompt) -> list[tuple[int, ...]]:
    outputs = run(engine, *(prompt.request(str(number)) for number, prompt in enumerate(prompts)))
    return [tuple(tokens_of(outputs[str(number)])) for number in range(len(prompts))]


def cached(engine: Engine, prompt: Prompt) -> int:
    [output, *_] = run(engine, prompt.request("cached", 1))["cached"]
    return output.cached_tokens or 0


def test_the_response_depends_on_the_pixels(engine: Engine, folder: Path) -> None:
    spec = spec_of(folder)
    colours = [Image.new("RGB", (40, 40), colour) for colour in ("black", "white", "red", "blue", "green", "yellow")]
    assert len(set(said(engine, *(Prompt.of(spec, [colour, text(1, 0)]) for colour in colours)))) > 2


def test_two_pictures_never_share_a_page(engine: Engine, folder: Path) -> None:
    spec, tail = spec_of(folder), text(80, 4)
    first, second = (Prompt.of(spec, [text(40, 3), random_image(40, 40, seed), tail]) for seed in (10, 11))
    assert first.tokens == second.tokens
    said(engine, first)
    assert cached(engine, second) == 32, "the page before the picture"
    assert cached(engine, first) > first.pictures[0].end
    moved = Prompt.of(spec, [text(40, 3), random_image(40, 40, 10), tail])
    other_key = replace(moved.pictures[0], key=b"the same pixels, prepared otherwise")
    assert cached(engine, Prompt(moved.tokens, (other_key,))) == 32
    assert cached(engine, Prompt(first.tokens, ())) == 32, "the same tokens without a picture"


def test_the_same_picture_again_is_cached(engine: Engine, folder: Path) -> None:
    spec, image = spec_of(folder), random_image(64, 32, 20)
    said(engine, Prompt.of(spec, [text(3, 5), image, text(70, 6)]))
    assert cached(engine, Prompt.of(spec, [text(3, 5), image, text(70, 6), text(5, 7)])) >= 64
    elsewhere = Prompt.of(spec, [text(9, 8), image, text(4, 9)])
    encoder = encoder_of(engine, [elsewhere])
    first = vectors_of(encoder, *elsewhere.pictures)
    encoder.remove(elsewhere.pictures)
    assert torch.equal(vectors_of(encoder, *elsewhere.pictures), first), "kept after its request has ended"
    assert encoder.num_encoded == 1


def test_a_model_with_recurrent_layers_reuses_a_picture_for_another_question(tmp_path: Path) -> None:
    write_vision_model("qwen3_5", tmp_path)
    spec, image = spec_of(tmp_path), random_image(80, 80, 20)
    engine = load(tmp_path)
    first, second = (Prompt.of(spec, [text(3, 5), image, text(70, seed)]) for seed in (6, 7))
    expected = said(load(tmp_path), second)
    said(engine, first)
    assert cached(engine, second) == first.pictures[0].end // 32 * 32
    assert said(engine, second) == expected
    engine.check_integrity()
    engine.close()


def test_pictures_of_waiting_requests_are_computed_together(engine: Engine, folder: Path) -> None:
    spec = spec_of(folder)
    images = [random_image(30, 30 + seed, seed) for seed in range(30, 37)]
    prompts = [Prompt.of(spec, [text(20, number), image, text(3, 0)]) for number, image in enumerate(images)]
    encoder = encoder_of(engine, prompts)
    together = vectors_of(encoder, *prompts[2].pictures)
    assert encoder.num_encoded == len(prompts)
    alone = encoder_of(engine, prompts, is_batch_invariant=True)
    assert torch.allclose(vectors_of(alone, *prompts[2].pictures), together, atol=1e-5)
    assert alone.num_encoded == 1
    assert said(engine, *prompts) == [said(engine, prompt)[0] for prompt in prompts]


def test_vectors_beyond_the_budget_are_dropped_and_computed_again(engine: Engine, folder: Path) -> None:
    spec = spec_of(folder)
    prompts = [Prompt.of(spec, [random_image(60, 60, seed), text(3, seed)]) for seed in (40, 41, 42)]
    pictures = [prompt.pictures[0] for prompt in prompts]
    encoder = encoder_of(engine, prompts, max_vectors=pictures[0].grid.num_features, is_batch_invariant=True)
    before = vectors_of(encoder, *pictures)  # a step gets all that it needs
    assert encoder.num_encoded == 3
    assert torch.equal(vectors_of(encoder, pictures[2]), before[-len(before) // 3 :])
    assert encoder.num_encoded == 3, "the latest is kept"
    assert torch.equal(vectors_of(encoder, *pictures), before)
    assert encoder.num_encoded == 5


def test_preempted_requests_with_pictures_respond_the_same(folder: Path, engine: Engine) -> None:
    spec = spec_of(folder)
    prompts = [
        Prompt.of(spec, [text(3, seed), random_image(60, 40, seed), text(20, seed), random_image(9, 40, seed)])
        for seed in range(50, 53)
    ]
    expected = [tuple(tokens_of(run(engine, prompt.request("x", 60))["x"])) for prompt in prompts]
    page_bytes = engine.info.kv_bytes // (engine.info.num_pages + 1)
    memory_bytes = load_bytes(engine) + 8 * page_bytes
    small = load(folder, 0, prefill_chunk_tokens=24, memory_bytes=memory_bytes, context_tokens=192)
    outputs = run(small, *(prompt.request(str(number), 60) for number, prompt in enumerate(prompts)))
    assert small.stats().preemptions > 0
    assert [tuple(tokens_of(outputs[str(number)])) for number in range(3)] == expected
    small.close()


def load_bytes(engine: Engine) -> int:
    from cortex.neuron.engine.memory.plan import ModelSizes
    from cortex.neuron.models.sizes import WeightStorage

    return ModelSizes.of(engine.model.architecture, WeightStorage(4)).weight_bytes


@pytest.mark.parametrize("changes", [{"vision": "cpu"}, {"deterministic": True}, {"speculation": "lookup"}])
def test_options_of_a_load_do_not_change_what_is_seen(folder: Path, engine: Engine, changes: dict[str, Any]) -> None:
    spec = spec_of(folder)
    prompts = [Prompt.of(spec, [text(5, 60), random_image(33, 50, 60), text(9, 61)]), Prompt.of(spec, [text(12, 62)])]
    other = load(folder, **changes)
    assert said(other, *prompts) == said(engine, *prompts)
    other.close()


def test_a_model_without_its_tower_rejects_pictures(folder: Path) -> None:
    engine = load(folder, vision="off")
    with pytest.raises(RequestError, match="without its vision tower"):
        engine.submit(Prompt.of(spec_of(folder), [random_image(30, 30, 1), text(1, 1)]).request("x"))
    engine.close()


def test_a_model_that_slept_sees_as_before(folder: Path) -> None:
    spec = LoadSpec(str(folder), dtype="float32", context_tokens=512, max_num_seqs=4)
    engine = Engine(load_model(spec, CPU, lambda *_: None, lambda: False), spec, moves_weights=True)
    prompt = Prompt.of(spec_of(folder), [text(5, 70), random_image(33, 50, 70), text(3, 71)])
    before = said(engine, prompt)
    engine.sleep()
    engine.wake(lambda *_: None)
    assert said(engine, prompt) == before
    engine.close()


@pytest.mark.parametrize("division", ["tensor", "stages"])
def test_divided_models_see_the_same(folder: Path, engine: Engine, tmp_path: Path, division: str) -> None:
    spec = spec_of(folder)
    whole = LoadSpec(str(folder), dtype="float32", context_tokens=512, max_num_seqs=4, prefill_chunk_tokens=24)
    stages = (StageSpec(0, 2), StageSpec(2, 1)) if division == "stages" else ()
    ranks = RankThreads([replace(whole, stages=stages)] * 2, tmp_path)
    prompts = [
        Prompt.of(spec, [text(5, 80), random_image(33, 50, 80), text(9, 81), random_image(16, 70, 82), text(2, 83)]),
        Prompt.of(spec, [text(12, 84)]),
    ]
    expected = said(engine, *prompts)
    assert said(ranks.leader, *prompts) == expected
    assert said(ranks.leader, *prompts) == expected, "from the prefix cache"
    assert ranks.leader.model.tower is not None
    assert ranks.follower.model.tower is None
    ranks.close()
    assert not ranks.errors


@given(
    grids=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(0, 4)), max_size=4),
    has_axes=st.booleans(),
    is_whole=st.booleans(),
    cuts=st.lists(st.integers(1, 9), max_size=30),
)
def test_chunks_have_all_positions_of_pictures_once(
    grids: list[tuple[int, int, int]], has_axes: bool, is_whole: bool, cuts: list[int]
) -> None:
    pictures: list[Picture] = []
    at = 0
    for rows, columns, gap in grids:
        at += gap
        pictures.append(Picture(at, PictureGrid(rows, columns, rows * columns, 0, 0), bytes([len(pictures)]), b""))
        at = pictures[-1].end
    length = at + 3
    positions = PicturePositions(pictures, PictureRules(has_axes, is_whole))
    start, found = 0, []
    cuts = [*cuts, *[length] * 2]
    for cut in cuts:
        if start >= length:
            break
        end = positions.cut(start, min(length, start + cut))
        assert end > start
        spans = positions.spans(start, end)
        for span in spans:
            found += [(span.key, span.first + place, start + span.offset + place) for place in range(span.count)]
        if is_whole:
            assert all(span.count == span.grid.num_tokens for span in spans)
        start = end
    assert start == length
    assert found == [(each.key, place, each.at + place) for each in pictures for place in range(each.grid.num_tokens)]
    if has_axes:
        gained = sum(each.grid.num_tokens - max(each.grid.rows, each.grid.columns) for each in pictures)
        assert positions.lag(length - 1) == gained
