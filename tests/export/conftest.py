from pathlib import Path

import pytest

from maskrcnn_trt.export.bundle import bundle_from_checkpoint
from maskrcnn_trt.model.spec import ShapeBucket


@pytest.fixture(scope="session")
def half_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model exported as fp16 for inputs of 96x160."""
    path = tmp_path_factory.mktemp("bundles") / "half"
    bundle_from_checkpoint(
        tiny_checkpoint, path, precisions=("fp16",), buckets=(ShapeBucket(96, 160),)
    )
    return path
