"""Pictures as files, much like those of COCO."""

from io import BytesIO

import numpy as np
from PIL import Image

_LANDSCAPES, _PORTRAITS = 12, 4
_SHORT, _LONG = 480, 640
_GRAIN = 18.0

PHOTO_LIKE = (
    f"{_LANDSCAPES + _PORTRAITS} drawn JPEGs of about 150 kB, COCO's mean, {_LANDSCAPES} of "
    f"{_SHORT}x{_LONG} pixels (height x width) and {_PORTRAITS} of {_LONG}x{_SHORT}, as far as "
    "they fit its input sizes"
)


def photo_like_jpegs() -> list[bytes]:
    """What `PHOTO_LIKE` says, always the same: soft blots of colour under a grain."""
    sizes = [(_SHORT, _LONG)] * _LANDSCAPES + [(_LONG, _SHORT)] * _PORTRAITS
    return [_photo_like_jpeg(seed, *size) for seed, size in enumerate(sizes)]


def _photo_like_jpeg(seed: int, height: int, width: int) -> bytes:
    random = np.random.default_rng(seed)
    blots = Image.fromarray(random.integers(0, 256, (8, 8, 3), np.uint8))
    smooth = np.asarray(blots.resize((width, height), Image.Resampling.BICUBIC), np.float32)
    grainy = smooth + random.normal(0, _GRAIN, (height, width, 1))
    file = BytesIO()
    Image.fromarray(grainy.clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=90)
    return file.getvalue()
