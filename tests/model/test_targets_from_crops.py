import torch
from small_models import ground_truth, noise_images, random_model, small_config

from maskrcnn_trt.model.roi_heads import boxes_within_crops
from maskrcnn_trt.plugins.mask_targets import mask_targets_from_crops

SIDE = 28


def disc(height: int, width: int) -> torch.Tensor:
    """Return an ellipse with a hole that touches the borders of [H, W]."""
    y = (torch.arange(height) + 0.5)[:, None] / height * 2 - 1
    x = (torch.arange(width) + 0.5) / width * 2 - 1
    radius = (x**2 + y**2).sqrt()
    return ((radius < 1) & (radius > 0.3)).to(torch.uint8)


def test_crop_at_full_resolution_gives_the_targets_of_the_whole_mask() -> None:
    crop = disc(112, 112)
    whole = torch.zeros(1, 1, 300, 400, dtype=torch.uint8)
    whole[0, 0, 50:162, 80:192] = crop
    owner = torch.tensor([[[80.0, 50, 192, 162]]]).expand(1, 3, 4)
    boxes = torch.tensor([[[80.0, 50, 192, 162], [90, 60, 150, 150], [100, 55, 188, 120]]])
    matched = torch.zeros(1, 3, dtype=torch.int64)
    expected = mask_targets_from_crops(whole, boxes, matched, SIDE)
    inside = boxes_within_crops(boxes, owner, 112)
    found = mask_targets_from_crops(crop[None, None], inside, matched, SIDE)
    torch.testing.assert_close(found[:, 1:], expected[:, 1:], atol=1e-5, rtol=0)
    # Samples at the border differ, because the whole mask has zeros beyond it.
    assert (found - expected).abs().mean() < 1e-3


def test_target_is_zero_outside_of_the_crop() -> None:
    crops = torch.ones(1, 1, 112, 112, dtype=torch.uint8)
    owner = torch.tensor([[[100.0, 100, 140, 180]]])
    boxes = torch.tensor([[[80.0, 100, 140, 180]]])
    matched = torch.zeros(1, 1, dtype=torch.int64)
    found = mask_targets_from_crops(crops, boxes_within_crops(boxes, owner, 112), matched, 30)[0, 0]
    assert found[:, :9].max() == 0
    assert found[:, 11:].min() > 0.99


def test_losses_from_crops_match_whole_masks() -> None:
    images, sizes = noise_images()
    whole, seeds = ground_truth(), torch.arange(2)
    masks = torch.zeros(2, 2, 112, 112, dtype=torch.uint8)
    masks[:, :, :56] = 1
    crops = whole._replace(masks=masks * (whole.labels > 0)[:, :, None, None])
    losses = {}
    for size, targets in ((None, whole), (112, crops)):
        config = small_config("resnet50", "fpn", "frozen_bn", roi={"mask_crop_size": size})
        terms = random_model(config).train()(images, sizes, targets, seeds)
        losses[size] = terms.means()
    assert losses[None].isfinite().all()
    torch.testing.assert_close(losses[112][:4], losses[None][:4], rtol=0, atol=0)
    torch.testing.assert_close(losses[112][4], losses[None][4], rtol=0.02, atol=0)
