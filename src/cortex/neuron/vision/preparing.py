"""From a decoded picture to the pixels that the model's worker gets. Runs where pictures are decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cortex.neuron.vision.picture import PictureGrid
from cortex.neuron.vision.spec import PictureSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image


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
