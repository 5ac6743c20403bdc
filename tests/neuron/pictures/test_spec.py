"""Sizes of pictures in prompts, and prepared pixels, against the reference library's processors."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from cortex.neuron.families.registry import BY_TYPE, family_of
from cortex.neuron.pictures.picture import PictureGrid, content_key
from cortex.neuron.pictures.spec import (
    MAX_ASPECT,
    MAX_PICTURE_TOKENS,
    Detail,
    PictureSpec,
    UnusablePicture,
    image_processor_in,
    prepare,
    read_picture_spec,
)

SIZES = [
    (1, 1),
    (1, 200),
    (200, 1),
    (31, 33),
    (48, 16),
    (640, 480),
    (1024, 1024),
    (1920, 1080),
    (1439, 27),
    (300, 2999),
]


def spec_of(model_type: str, vision: Mapping[str, Any] = {}, processor: Mapping[str, Any] = {}) -> PictureSpec:
    spec = read_picture_spec(BY_TYPE[model_type].pictures, {"vision_config": vision}, processor)
    assert spec is not None
    return spec


def picture(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width * 7919 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def library_pixels(model_type: str, image: Image.Image) -> tuple[np.ndarray[Any, Any], int]:
    """What the library's PIL processor returns for one picture, as [height, width, 3], and its number of tokens."""
    match model_type:
        case "qwen3_vl":
            from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

            size = {"shortest_edge": 65_536, "longest_edge": 16_777_216}
            half = [0.5, 0.5, 0.5]
            found = Qwen2VLImageProcessorPil(patch_size=16, size=size, image_mean=half, image_std=half)(image)
            _, rows, columns = found["image_grid_thw"][0]
            shape = (rows // 2, columns // 2, 2, 2, 3, 2, 16, 16)
            patches = np.asarray(found["pixel_values"]).reshape(shape)[:, :, :, :, :, 0]
            return patches.transpose(0, 2, 5, 1, 3, 6, 4).reshape(rows * 16, columns * 16, 3), int(rows * columns // 4)
        case "gemma3":
            from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

            found = Gemma3ImageProcessorPil(size={"height": 896, "width": 896}, do_pan_and_scan=False)(image)
            return np.asarray(found["pixel_values"][0]).transpose(1, 2, 0), 256
        case "gemma4":
            from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

            found = Gemma4ImageProcessorPil()(image)
            positions = np.asarray(found["image_position_ids"][0])
            columns, rows = positions.max(axis=0) + 1
            patches = np.asarray(found["pixel_values"][0])[: rows * columns].reshape(rows, columns, 16, 16, 3)
            pixels = patches.transpose(0, 2, 1, 3, 4).reshape(rows * 16, columns * 16, 3)
            return pixels, int(found["num_soft_tokens_per_image"][0])
        case _:
            from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

            found = PixtralImageProcessorPil(size={"longest_edge": 1540}, patch_size={"height": 28, "width": 28})(image)
            pixels = np.asarray(found["pixel_values"][0]).transpose(1, 2, 0)
            return pixels, (pixels.shape[0] // 28) * (pixels.shape[1] // 28 + 1)


@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3", "gemma4", "mistral3"])
def test_sizes_and_pixels_are_those_of_the_library(model_type: str) -> None:
    pytest.importorskip("transformers")
    spec = spec_of(model_type)
    for width, height in SIZES:
        image = picture(width, height)
        grid = spec.grid(width, height)
        if model_type == "mistral3" and 0 in (width * 1540 // max(width, height), height * 1540 // max(width, height)):
            continue  # the library loses a side
        expected, num_tokens = library_pixels(model_type, image)
        pixels = prepare(spec, grid, image)
        assert (grid.num_tokens, pixels.shape) == (num_tokens, expected.shape), (width, height)
        normalised = (pixels / 255 - np.array(spec.mean)) / np.array(spec.std)
        assert np.abs(normalised - expected).max() < 1e-5, (width, height)


@given(
    model_type=st.sampled_from(sorted(name for name, family in BY_TYPE.items() if family.pictures)),
    width=st.integers(1, 30_000),
    height=st.integers(1, 30_000),
    detail=st.sampled_from(["auto", "low", "high"]),
)
def test_every_picture_has_a_size_within_bounds_or_is_rejected(
    model_type: str, width: int, height: int, detail: Detail
) -> None:
    spec = spec_of(model_type)
    if max(width, height) > MAX_ASPECT * min(width, height):
        with pytest.raises(UnusablePicture, match="crop it"):
            spec.grid(width, height, detail)
        return
    grid = spec.grid(width, height, detail)
    assert 1 <= grid.num_features <= spec.max_tokens <= MAX_PICTURE_TOKENS
    assert (grid.width, grid.height) == (grid.columns * spec.side, grid.rows * spec.side)
    assert len(grid.feature_offsets()) == grid.num_features
    assert grid.num_tokens == grid.num_features + (grid.rows if spec.text.row_end else 0)


@pytest.mark.parametrize(
    ("model_type", "tokens"),
    [
        ("qwen3_5", (1024, 256, 1024)),
        ("gemma3", (256,) * 3),
        ("gemma4", (256, 64, 1089)),
        ("mistral3", (1406, 272, 1406)),
    ],
)
def test_detail_sets_the_number_of_tokens(model_type: str, tokens: tuple[int, ...]) -> None:
    spec = spec_of(model_type)
    details: tuple[Detail, ...] = ("auto", "low", "high")
    assert tuple(spec.grid(1024, 1024, detail).num_tokens for detail in details) == tokens


def test_files_decide_over_the_familys_defaults() -> None:
    processor = {"size": {"longest_edge": 4096, "shortest_edge": 1024}, "image_mean": [0, 0, 0], "resample": 2}
    spec = spec_of("qwen3_5", {"patch_size": 8, "spatial_merge_size": 4}, processor)
    assert (spec.patch, spec.merge, spec.most, spec.least) == (8, 4, 4096, 1024)
    assert (spec.mean, spec.resample) == ((0.0, 0.0, 0.0), "bilinear")
    assert spec_of("qwen3_5", {}, {"max_pixels": 8192}).most == 8192
    assert spec_of("gemma4", {}, {"max_soft_tokens": 70}).most == 70
    inner = {"image_processor": {"max_pixels": 1}}
    assert image_processor_in({"processor_config.json": inner, "preprocessor_config.json": {"max_pixels": 2}}) == {
        "max_pixels": 1
    }
    assert image_processor_in({"preprocessor_config.json": {"max_pixels": 2}}) == {"max_pixels": 2}
    with pytest.raises(ValueError, match="max_pixels is 'many'"):
        spec_of("qwen3_5", {}, {"max_pixels": "many"})


def test_a_model_without_a_tower_takes_no_pictures() -> None:
    assert read_picture_spec(family_of({"model_type": "qwen3_5"}).pictures, {}, {}) is None
    assert read_picture_spec(family_of({"model_type": "llama"}).pictures, {"vision_config": {}}, {}) is None


def test_rows_of_a_picture_are_written_with_their_ends() -> None:
    text = spec_of("mistral3").text
    assert text.written(PictureGrid(2, 3, 8, 84, 56)) == "[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]"
    assert PictureGrid(2, 3, 8, 84, 56).feature_offsets() == (0, 1, 2, 4, 5, 6)
    assert spec_of("qwen3_5").text.written(PictureGrid(1, 2, 2, 64, 32)) == "<|image_pad|><|image_pad|>"


def test_the_key_of_a_picture_depends_on_file_size_preprocessing_and_tenant() -> None:
    sizes = PictureGrid(1, 2, 2, 64, 32), PictureGrid(2, 1, 2, 32, 64)
    keys = {content_key(*parts) for parts in itertools.product((b"a", b"b"), sizes, (b"", b"x"), (b"", b"tenant"))}
    assert len(keys) == 16
    assert spec_of("qwen3_5").digest != spec_of("qwen3_5", {}, {"image_mean": [0, 0, 0]}).digest
