"""How a model takes pictures, read from its files: `config.json`, and the settings of its image processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cortex.neuron.vision.spec import PictureDefaults, PictureSpec, Resample

Json = Mapping[str, Any]

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files with the settings of the image processor; the first ones take precedence."""

_RESAMPLES: Mapping[int, Resample] = {2: "bilinear", 3: "bicubic"}
"""By the numbers that image processors' files use."""


def read_picture_spec(family: PictureDefaults | None, config: Json, processor: Json) -> PictureSpec | None:
    """None for a model that takes no pictures. `family`: what the model's files leave out. `processor`: the
    settings of the image processor, empty if the model has no such file. Raises ValueError for settings that are not
    numbers of the right kind."""
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
