"""How a model takes pictures, read from its files: `config.json`, and the settings of its image processor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cortex.neuron.vision.spec import PictureSpec, PictureText, Resample, Sizing

Json = Mapping[str, Any]

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files with the settings of the image processor; the first ones take precedence."""

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
QWEN_TEXT = PictureText("<|image_pad|>", "<|image_pad|>")
GEMMA3_TEXT = PictureText(
    "<start_of_image>", "<image_soft_token>", before="\n\n<start_of_image>", after="<end_of_image>\n\n"
)
GEMMA4_TEXT = PictureText("<|image|>", "<|image|>", before="<|image>", after="<image|>")
PIXTRAL_TEXT = PictureText("[IMG]", "[IMG]", row_end="[IMG_BREAK]", end="[IMG_END]")
_RESAMPLES: Mapping[int, Resample] = {2: "bilinear", 3: "bicubic"}
"""By the numbers that image processors' files use."""


@dataclass(frozen=True, slots=True)
class PictureFamily:
    """What a family's files leave out. Where `patch` and the others are in them, the files decide."""

    sizing: Sizing
    text: PictureText
    most: int
    patch: int = 16
    merge: int = 2
    least: int = 0
    choices: tuple[int, ...] = ()
    resample: Resample = "bicubic"
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


_QWEN = PictureFamily("area", QWEN_TEXT, most=16_777_216, least=65_536)
_GEMMA4 = PictureFamily(
    "budget",
    GEMMA4_TEXT,
    most=280,
    merge=3,
    choices=(70, 140, 280, 560, 1120),
    mean=(0.0, 0.0, 0.0),
    std=(1.0, 1.0, 1.0),
)
PICTURE_FAMILIES: Mapping[str, PictureFamily] = {
    "qwen3_5": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "gemma3": PictureFamily("square", GEMMA3_TEXT, most=896, patch=14, merge=4, resample="bilinear"),
    "gemma4": _GEMMA4,
    # No picture is longer than the window of its layers, so that all of it is seen there.
    "gemma4_unified": replace(_GEMMA4, choices=_GEMMA4.choices[:4]),
    "mistral3": PictureFamily("edge", PIXTRAL_TEXT, most=1540, patch=14, mean=CLIP_MEAN, std=CLIP_STD),
}
"""By the `model_type` of the whole model's config."""


def read_picture_spec(config: Json, processor: Json) -> PictureSpec | None:
    """None for a model that takes no pictures. `processor`: the settings of the image processor, empty if the model has
    no such file. Raises ValueError for settings that are not numbers of the right kind."""
    family = PICTURE_FAMILIES.get(str(config.get("model_type")))
    vision = config.get("vision_config")
    if family is None or not isinstance(vision, Mapping):
        return None
    size = processor.get("size")
    sizes = size if isinstance(size, Mapping) else {}
    patch = _count(vision, "patch_size", family.patch)
    most, least, merge = family.most, family.least, family.merge
    match family.sizing:
        case "area":
            most = _count(processor, "max_pixels", _count(sizes, "longest_edge", most))
            least = _count(processor, "min_pixels", _count(sizes, "shortest_edge", least))
            merge = _count(vision, "spatial_merge_size", merge)
        case "square":
            most = _count(sizes, "height", _count(vision, "image_size", most))
            tokens = _count(config, "mm_tokens_per_image", 256)
            merge = most // patch // max(1, round(tokens**0.5))
        case "budget":
            most = _count(processor, "max_soft_tokens", most)
            merge = _count(vision, "pooling_kernel_size", merge)
        case "edge":
            most = _count(sizes, "longest_edge", _count(vision, "image_size", most))
            merge = _count(config, "spatial_merge_size", merge)
    choices = tuple(sorted({*family.choices, most})) if family.choices else ()
    resample = _RESAMPLES.get(_count(processor, "resample", 0), family.resample)
    mean, std = _colours(processor, "image_mean", family.mean), _colours(processor, "image_std", family.std)
    if processor.get("do_normalize") is False:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    return PictureSpec(family.sizing, patch, merge, most, least, choices, resample, mean, std, family.text)


def image_processor_in(files: Mapping[str, Json]) -> Json:
    """The settings of the image processor among the contents of `PROCESSOR_FILES`, by name; `{}` if none has them."""
    for name in PROCESSOR_FILES:
        content = files.get(name, {})
        inner = content.get("image_processor")
        if isinstance(inner, Mapping):
            return inner
        if name == "preprocessor_config.json" and content:
            return content
    return {}


def _count(values: Json, name: str, default: int) -> int:
    value = values.get(name)
    if value is None:
        return default
    if isinstance(value, Mapping):  # {"height": 16, "width": 16}
        value = value.get("height")
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{name} is {value!r}, not a count")
    return value


def _colours(values: Json, name: str, default: tuple[float, float, float]) -> tuple[float, float, float]:
    value = values.get(name)
    if value is None:
        return default
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(each, (int, float)) for each in value):
        raise ValueError(f"{name} is {value!r}, not three numbers")
    return float(value[0]), float(value[1]), float(value[2])
