"""Decoding on the device gives the same batches as decoding in data loader workers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from coco_folder import annotation, make_config, synthetic_config, valid_content, write_folder
from PIL import Image
from torch import Tensor

from maskrcnn_trt.training.config import DatasetConfig, TrainConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset, DataError
from maskrcnn_trt.training.data.loading.batches import Batch, EncodedBatch
from maskrcnn_trt.training.data.loading.device_batches import prefetch_batches
from maskrcnn_trt.training.data.loading.loader import eval_loader, train_loader

CPU = torch.device("cpu")


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Device that decodes."""
    return torch.device(request.param)


def train_batches(config: TrainConfig, device: torch.device = CPU) -> list[Batch]:
    dataset = CocoDataset(config.data.train)
    batches = train_loader(dataset, config, pin_memory=device.type == "cuda")
    return list(prefetch_batches(device, batches))


def assert_alike(images: Tensor, others: Tensor) -> None:
    """Compare up to rounding. A GPU decoder interpolates colours more coarsely."""
    assert images.shape == others.shape
    difference = images.float() - others.float()
    grey = torch.tensor([0.299, 0.587, 0.114], device=images.device)[:, None, None]
    assert (difference * grey).sum(dim=1).abs().mean() < 0.5
    assert difference.abs().mean() < (8 if images.is_cuda else 0.5)


@pytest.mark.parametrize("size", [{}, {"min_size": 48, "max_size": 72}], ids=["as is", "resized"])
def test_the_device_decodes_what_workers_decode(
    synthetic: DatasetConfig, device: torch.device, size: dict[str, Any]
) -> None:
    expected = train_batches(synthetic_config(synthetic, **size), device)
    found = train_batches(synthetic_config(synthetic, decode="device", **size), device)
    assert len(found) == len(expected)
    for own, other in zip(found, expected, strict=True):
        assert_alike(own.images, other.images)
        for part in ("image_sizes", "image_ids", "source_sizes", "seeds"):
            assert torch.equal(getattr(own, part), getattr(other, part))
        for ours, theirs in zip(own.targets, other.targets, strict=True):
            assert torch.equal(ours, theirs)


def test_what_the_device_cannot_decode_is_left_to_workers(
    tmp_path: Path, device: torch.device
) -> None:
    """Files: a PNG, a grey JPEG, a CMYK JPEG and a JPEG with an EXIF rotation."""
    content = valid_content()
    dataset = write_folder(tmp_path, content)
    image = Image.open(tmp_path / "5.jpg")
    image.convert("L").save(tmp_path / "8.jpg")
    image.convert("CMYK").save(tmp_path / "9.jpg")
    exif = Image.Exif()
    exif[0x0112] = 6
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "11.jpg", exif=exif)
    batches = {
        decode: list(
            prefetch_batches(
                device, eval_loader(CocoDataset(dataset), make_config(dataset, decode=decode))
            )
        )
        for decode in ("workers", "device")
    }
    for own, other in zip(batches["device"], batches["workers"], strict=True):
        assert own.image_ids.tolist() == other.image_ids.tolist()
        assert_alike(own.images, other.images)


def test_cut_off_files_are_replaced_as_by_workers(tmp_path: Path) -> None:
    dataset = write_folder(tmp_path, valid_content())
    whole = (tmp_path / "5.jpg").read_bytes()
    (tmp_path / "5.jpg").write_bytes(whole[: len(whole) // 2])
    loader = train_loader(CocoDataset(dataset), make_config(dataset, decode="device"))
    batches = list(loader)
    assert any(isinstance(batch, EncodedBatch) for batch in batches)
    assert {reason.split(":")[0] for b in batches for reason in b.skipped} == {
        str(tmp_path / "5.jpg")
    }
    assert all(5 not in batch.image_ids for batch in batches)


def test_files_damaged_within_are_named(tmp_path: Path, device: torch.device) -> None:
    content = {**valid_content(), "annotations": [annotation(1, 5)]}
    content["images"] = [i for i in content["images"] if i["id"] == 5]
    dataset = write_folder(tmp_path, content)
    data = (tmp_path / "5.jpg").read_bytes()
    # The file has no decoder tables, but its header is intact.
    damaged = data.replace(b"\xff\xdb", b"\xff\xe9").replace(b"\xff\xc4", b"\xff\xe9")
    (tmp_path / "5.jpg").write_bytes(damaged)
    loader = train_loader(CocoDataset(dataset), make_config(dataset, decode="device"))
    with pytest.raises(DataError, match=r"5\.jpg cannot be decoded .*data\.decode=workers"):
        list(prefetch_batches(device, loader))


@pytest.mark.gpu
def test_batches_keep_their_order_and_content_while_the_next_are_prepared(
    synthetic: DatasetConfig,
) -> None:
    device = torch.device("cuda")
    config = synthetic_config(synthetic, decode="device")
    expected = train_batches(config, device)
    dataset = CocoDataset(config.data.train)
    weight = torch.randn(4096, 4096, device=device)
    for own, other in zip(
        prefetch_batches(device, train_loader(dataset, config)), expected, strict=True
    ):
        for _ in range(20):  # keep the device busy, so that memory reused too early is noticed
            weight = (weight @ weight).clamp(-1, 1)
        assert torch.equal(own.images, other.images)
