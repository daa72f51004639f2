from pathlib import Path

import pytest

from maskrcnn_trt.export.engine_limits import limited_checkpoint
from maskrcnn_trt.model.checkpoint import Checkpoint, load_checkpoint


def with_candidates(checkpoint: Checkpoint, proposals: int, detections: int) -> Checkpoint:
    config = checkpoint.model_config
    rpn = config.rpn.model_copy(update={"pre_nms_top_n_test": proposals})
    roi = config.roi.model_copy(update={"nms_candidates": detections})
    values = {
        **vars(checkpoint),
        "model_config": config.model_copy(update={"rpn": rpn, "roi": roi}),
    }
    return Checkpoint(**values)


@pytest.mark.parametrize("counts", [(1000, 2000), (3840, 3840)])
def test_what_tensorrt_can_select_stays(tiny_checkpoint: Path, counts: tuple[int, int]) -> None:
    checkpoint = with_candidates(load_checkpoint(tiny_checkpoint), *counts)
    limited, changes = limited_checkpoint(checkpoint)
    assert limited.model_config == checkpoint.model_config
    assert changes == ""


def test_what_it_cannot_select_is_limited_and_said(tiny_checkpoint: Path) -> None:
    checkpoint = with_candidates(load_checkpoint(tiny_checkpoint), 6000, 4000)
    limited, changes = limited_checkpoint(checkpoint)
    assert limited.model_config == with_candidates(checkpoint, 3840, 3840).model_config
    assert changes == (
        "rpn.pre_nms_top_n_test=3840 instead of 6000, roi.nms_candidates=3840 instead of 4000"
    )
    assert checkpoint.model_config.rpn.pre_nms_top_n_test == 6000
