"""Coverage-guided fuzzing of image decoding.

    python tests/fuzzing/fuzz_images.py CORPUS -max_total_time=300 -timeout=10 -rss_limit_mb=2048

This command runs for five minutes. It fills the folder CORPUS with a few valid images, and with
inputs that reach new code. A failing input is written to a file; to reproduce the failure, pass the
path of that file instead of CORPUS. The options are libFuzzer's.
"""

import itertools
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import atheris
from PIL import Image

with atheris.instrument_imports(include=["PIL", "maskrcnn_trt"]):
    from maskrcnn_trt.model.bundle.manifest import Preprocessing
    from maskrcnn_trt.model.bundle.spec import ShapeBucket
    from maskrcnn_trt.model.image_decoding import decode_image, read_header
    from maskrcnn_trt.model.image_limits import ImageError
    from maskrcnn_trt.serving.engines.host_steps import plan_image, prepare_image

_MAX_PIXELS = 1 << 18
_BUCKETS = (ShapeBucket(32, 48), ShapeBucket(48, 32))
_PREPROCESSING = Preprocessing(
    min_size=32, max_size=48, pixel_mean=(0.0, 0.0, 0.0), pixel_std=(1.0, 1.0, 1.0)
)


def check_image(data: bytes) -> None:
    """Check that an image is decoded as its header says, or rejected in one line."""
    rejection = None
    try:
        header = read_header(data, max_pixels=_MAX_PIXELS)
        planned = plan_image(data, _PREPROCESSING, _BUCKETS, max_pixels=_MAX_PIXELS)
        pixels = decode_image(data, max_pixels=_MAX_PIXELS)
        prepared = prepare_image(planned)
    except ImageError as error:
        rejection = str(error)
    if rejection is not None:
        assert "\n" not in rejection, rejection
        return
    assert pixels.shape == (*header.size, 3), (pixels.shape, header)
    assert (prepared.bucket, prepared.size) == (planned.bucket, planned.size)


def valid_images() -> Iterator[bytes]:
    """Yield small images of each format, with metadata and several frames."""
    gradient = Image.radial_gradient("L").resize((20, 12))
    exif = Image.Exif()
    exif[0x0112] = 6
    modes = {
        "JPEG": ("L", "RGB", "CMYK"),
        "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
        "WEBP": ("RGB", "RGBA"),
    }
    for codec, mode in itertools.chain(*([(c, m) for m in ms] for c, ms in modes.items())):
        image = gradient.convert(mode)
        for options in (
            {},
            {"exif": exif, "icc_profile": b"profile" * 20},
            {"progressive": True, "comment": b"comment", "restart_marker_rows": 1},
            {"save_all": codec != "JPEG", "append_images": [image], "lossless": True},
        ):
            file = BytesIO()
            image.save(file, codec, **options)
            yield file.getvalue()


def main() -> None:
    folder = Path(sys.argv[1])
    if not folder.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        for index, data in enumerate(valid_images()):
            (folder / f"valid-{index:02}").write_bytes(data)
    atheris.Setup(sys.argv, check_image)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
