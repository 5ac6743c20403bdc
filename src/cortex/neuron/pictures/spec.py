"""A model's picture input: size in pixels and in tokens, and the text in a prompt."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cortex.neuron.pictures.picture import PictureGrid

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image

Detail = Literal["auto", "low", "high"]
"""`low`: a quick look, at most about a 512 × 512 picture's worth of tokens; `auto` and `high`: as the model was made
for, and in models with a choice of sizes `high` is the largest."""

MAX_ASPECT = 200
"""The longer side by the shorter: beyond it nothing of a picture can be recognised, and one side would vanish."""
MAX_PICTURE_TOKENS = 4096
"""Also where a model would allow more: the memory of its tower is planned for it."""
LOW_TOKENS = 256

Resample = Literal["bilinear", "bicubic"]
Sizing = Literal["area", "square", "budget", "edge"]


class UnusablePicture(ValueError):
    """The picture cannot be shown to the model. The message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class PictureText:
    """How a picture is written in a prompt."""

    placeholder: str
    """What the chat template writes for a picture: the text of one token."""
    feature: str
    """The token at each position that has a vector of the picture."""
    before: str = ""
    after: str = ""
    row_end: str = ""
    """The token after each row but the last; empty: rows follow each other."""
    end: str = ""
    """The token after the last row, where rows end with one."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """The texts of one token each that stand for a picture."""
        return tuple(text for text in (self.placeholder, self.feature, self.row_end, self.end) if text)

    def written(self, grid: PictureGrid) -> str:
        """The text that takes the place of the placeholder."""
        row = self.feature * grid.columns
        rows = (row + self.row_end) * (grid.rows - 1) + row + self.end
        return f"{self.before}{rows}{self.after}"


@dataclass(frozen=True, slots=True)
class PictureDefaults:
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


@dataclass(frozen=True, slots=True)
class PictureSpec:
    """How one model takes pictures. A plain value: it crosses channels between processes."""

    sizing: Sizing
    """`area`: the sides keep their ratio, and the pixels are between `least` and `most`. `square`: always `most` pixels
    to a side. `budget`: as many tokens as fit in `most`. `edge`: the longer side has at most `most` pixels."""
    patch: int
    """Pixels to the side of a patch."""
    merge: int
    """Patches to the side of what becomes one token."""
    most: int
    least: int = 0
    choices: tuple[int, ...] = ()
    """With `budget`: those that the model was made for, ascending."""
    resample: Resample = "bicubic"
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    """Subtracted from each channel in 0…1, which is then divided by `std`; both happen on the device."""
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    text: PictureText = PictureText("", "")

    @property
    def side(self) -> int:
        """Pixels to the side of one token."""
        return self.patch * self.merge

    @property
    def max_tokens(self) -> int:
        """Vectors that a picture has at most, of any size."""
        most = self.most
        match self.sizing:
            case "area":
                return min(most // self.side**2, MAX_PICTURE_TOKENS)
            case "square" | "edge":
                return (most // self.side + (most % self.side > 0)) ** 2
            case "budget":
                return max((most, *self.choices))

    @property
    def digest(self) -> bytes:
        """A digest of everything that pixels depend on besides a picture's file and size."""
        settings = (self.sizing, self.patch, self.merge, self.resample, self.mean, self.std)
        return hashlib.blake2b(repr(settings).encode(), digest_size=16).digest()

    def grid(self, width: int, height: int, detail: Detail = "auto") -> PictureGrid:
        """The size in the prompt of a picture of `width` × `height` pixels, upright. Raises UnusablePicture."""
        if min(width, height) < 1:
            raise UnusablePicture(f"a picture of {width} × {height} pixels has no content")
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise UnusablePicture(
                f"a picture of {width} × {height} pixels is more than {MAX_ASPECT} times as long as wide; crop it"
            )
        columns, rows = _SIZINGS[self.sizing](self, width, height, detail)
        ends = rows if self.text.row_end else 0
        return PictureGrid(rows, columns, rows * columns + ends, columns * self.side, rows * self.side)


def _area(spec: PictureSpec, width: int, height: int, detail: Detail) -> tuple[int, int]:
    side, pixels = spec.side, width * height
    most = min(spec.most, (LOW_TOKENS if detail == "low" else MAX_PICTURE_TOKENS) * side**2)
    least = min(spec.least, most)
    # To the nearest multiple, halves to the even one, as the model was trained with.
    columns, rows = round(width / side), round(height / side)
    if columns * rows * side**2 > most:
        shrink = math.sqrt(pixels / most)
        return max(1, math.floor(width / shrink / side)), max(1, math.floor(height / shrink / side))
    if columns * rows * side**2 < max(least, 1):
        grow = math.sqrt(least / pixels)
        return max(1, math.ceil(width * grow / side)), max(1, math.ceil(height * grow / side))
    return columns, rows


def _square(spec: PictureSpec, _width: int, _height: int, _detail: Detail) -> tuple[int, int]:
    return spec.most // spec.side, spec.most // spec.side


def _budget(spec: PictureSpec, width: int, height: int, detail: Detail) -> tuple[int, int]:
    choices = spec.choices or (spec.most,)
    budget = {"low": choices[0], "auto": spec.most, "high": choices[-1]}[detail]
    factor = math.sqrt(budget * spec.side**2 / (width * height))
    columns, rows = math.floor(factor * width / spec.side), math.floor(factor * height / spec.side)
    if rows == 0:
        return min(width // height, budget), 1
    if columns == 0:
        return 1, min(height // width, budget)
    return columns, rows


def _edge(spec: PictureSpec, width: int, height: int, detail: Detail) -> tuple[int, int]:
    side = spec.side
    most = min(spec.most, math.isqrt(LOW_TOKENS) * side) if detail == "low" else spec.most
    ratio = max(width / most, height / most)
    if ratio > 1:
        width, height = math.floor(width / ratio), math.floor(height / ratio)
    return max(1, -(-width // side)), max(1, -(-height // side))


_SIZINGS: Mapping[Sizing, Callable[[PictureSpec, int, int, Detail], tuple[int, int]]] = {
    "area": _area,
    "square": _square,
    "budget": _budget,
    "edge": _edge,
}


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


def prepare(spec: PictureSpec, grid: PictureGrid, image: Image.Image) -> NDArray[np.uint8]:
    """[height, width, 3]: an upright RGB picture at the size of its grid, as the reference library's processors
    resize it. The device normalises it and cuts it into patches. Raises ValueError for a picture in another mode."""
    import numpy as np
    from PIL import Image

    if image.mode != "RGB":
        raise ValueError(f"the picture has mode {image.mode}, not RGB")
    size = (grid.width, grid.height)
    if image.size != size:
        methods = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
        image = image.resize(size, methods[spec.resample])
    return np.asarray(image, dtype=np.uint8)
