import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval
from tiny_run import CLASSES
from torchvision.models.detection.roi_heads import paste_masks_in_image
from torchvision.models.detection.transform import resize_boxes

from maskrcnn_trt.model.bundle.spec import ShapeBucket
from maskrcnn_trt.model.config.schema import (
    AnchorConfig,
    BackboneConfig,
    ModelConfig,
    RoiConfig,
    RpnConfig,
)
from maskrcnn_trt.model.mask_rcnn import MaskRCNN
from maskrcnn_trt.model.masks import rle_from_mask
from maskrcnn_trt.training.config import ConfigError, DataConfig, DatasetConfig, TrainConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset
from maskrcnn_trt.training.data.coco.segmentation_masks import mask_from_segmentation
from maskrcnn_trt.training.data.loading.loader import eval_loader
from maskrcnn_trt.training.data.synthetic.dataset import SyntheticConfig, draw_dataset
from maskrcnn_trt.training.distributed import Worker
from maskrcnn_trt.training.evaluation.detections import ImageDetections
from maskrcnn_trt.training.evaluation.evaluator import CocoEvaluator, evaluate_model
from maskrcnn_trt.training.evaluation.result_files import read_mask_results

CPU = torch.device("cpu")
ALONE = Worker(0, 1, CPU)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic")
    config = SyntheticConfig(train=1, val=12, width=160, height=128, seed=2, classes=CLASSES)
    draw_dataset(folder, config)
    return folder


@pytest.fixture(scope="module")
def dataset(folder: Path) -> CocoDataset:
    return CocoDataset(_dataset_config(folder))


def _dataset_config(folder: Path) -> DatasetConfig:
    return DatasetConfig(images=folder / "val", annotations=folder / "annotations/val.json")


def _evaluator(dataset: CocoDataset) -> CocoEvaluator:
    """Return an evaluator for a model with the classes of the data set."""
    return CocoEvaluator(dataset, dataset.categories, ALONE)


def _train_config(folder: Path) -> TrainConfig:
    """Return a configuration with inputs of three quarters of the image size."""
    buckets = (ShapeBucket(96, 128), ShapeBucket(128, 96))
    dataset = _dataset_config(folder)
    return TrainConfig(
        data=DataConfig(train=dataset, min_size=96, max_size=128, buckets=buckets, workers=0)
    )


def _detections(dataset: CocoDataset, number: int) -> ImageDetections:
    """Return the ground truth of an image as detections with random scores."""
    record = dataset.records[number]
    size = (record.height, record.width)
    objects = record.objects
    boxes = [instance.clipped_box(*size) for instance in objects]
    masks = [mask_from_segmentation(o.segmentation, size, size) for o in objects]
    return ImageDetections(
        boxes=np.array(boxes, np.float32).reshape(-1, 4),
        scores=np.random.default_rng(number).random(len(boxes), np.float32),
        labels=np.array([instance.label for instance in objects], np.int64),
        masks=[rle_from_mask(mask) for mask in masks],
    )


def test_detections_in_crowds_are_not_counted(dataset: CocoDataset, tmp_path: Path) -> None:
    """Otherwise, the ground truth itself is detected, which is perfect."""
    content = json.loads(Path(dataset.name).read_text())
    crowd, *others = sorted(content["annotations"], key=lambda a: (-a["iscrowd"], -a["area"]))
    crowd["iscrowd"] = 1
    content["annotations"] = [crowd, *(a for a in others if a["image_id"] != crowd["image_id"])]
    path = tmp_path / "crowd.json"
    path.write_text(json.dumps(content))
    images = Path(dataset.name).parent.parent / "val"
    crowded = CocoDataset(DatasetConfig(images=images, annotations=path))
    evaluator = _evaluator(crowded)
    for number, record in enumerate(crowded.records):
        evaluator.add(record.id, _detections(crowded, number))
    x, y, width, height = crowd["bbox"]
    record = next(r for r in crowded.records if r.id == crowd["image_id"])
    mask = mask_from_segmentation(
        record.instances[0].segmentation, *[(record.height, record.width)] * 2
    )
    inside = ImageDetections(
        boxes=np.array([[x, y, x + width / 2, y + height]], np.float32),
        scores=np.ones(1, np.float32),
        labels=np.array([record.instances[0].label]),
        masks=[rle_from_mask(mask)],
    )
    evaluator.add(record.id, inside)
    metrics = evaluator.evaluate()
    assert metrics["bbox/AP"] == pytest.approx(1)
    assert metrics["segm/AP"] == pytest.approx(1)


@pytest.mark.parametrize(("image_id", "category_id"), [("img_{}", "{}"), ("{}", "0{}")])
def test_result_files_have_the_ids_of_the_annotation_file(
    dataset: CocoDataset, tmp_path: Path, image_id: str, category_id: str
) -> None:
    """The ids in the file are strings. Half of the objects are detected."""
    content = json.loads(Path(dataset.name).read_text())
    for entry in (*content["images"], *content["categories"]):
        entry["id"] = (image_id if "file_name" in entry else category_id).format(entry["id"])
    for entry in content["annotations"]:
        entry["image_id"] = image_id.format(entry["image_id"])
        entry["category_id"] = category_id.format(entry["category_id"])
    path = tmp_path / "strings.json"
    path.write_text(json.dumps(content))
    own = CocoDataset(DatasetConfig(images=dataset.config.images, annotations=path))
    evaluator = _evaluator(own)
    for number, record in enumerate(own.records):
        boxes, scores, labels, masks = _detections(own, number)
        half = len(masks) // 2 + number % 2
        evaluator.add(
            record.id, ImageDetections(boxes[:half], scores[:half], labels[:half], masks[:half])
        )
    metrics = evaluator.evaluate(tmp_path)
    assert 0 < metrics["segm/AP"] < 1
    for iou_type in ("bbox", "segm"):
        truth = COCO(path)
        found = truth.loadRes(str(tmp_path / f"{iou_type}.json"))
        evaluation = COCOeval(truth, found, iou_type)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        assert evaluation.stats[0] == pytest.approx(metrics[f"{iou_type}/AP"], abs=1e-6)
    predictions = torch.load(tmp_path / "predictions.pth", weights_only=True)
    assert {p["image_id"] for p in predictions} == {image["id"] for image in content["images"]}
    assert read_mask_results(tmp_path, own) == json.loads(json.dumps(evaluator.mask_results()))


def test_no_detections_are_zero(dataset: CocoDataset, tmp_path: Path) -> None:
    evaluator = _evaluator(dataset)
    numbers = np.zeros(0, np.float32)
    nothing = ImageDetections(np.zeros((0, 4), np.float32), numbers, numbers.astype(int), [])
    for record in dataset.records:
        evaluator.add(record.id, nothing)
    metrics = evaluator.evaluate(tmp_path)
    assert metrics["bbox/AP"] == metrics["segm/AP50"] == metrics["segm/AP/ring"] == 0
    for name in ("bbox.json", "segm.json"):
        assert json.loads((tmp_path / name).read_text()) == []


def test_a_file_that_cannot_be_written_loses_neither_metrics_nor_other_files(
    dataset: CocoDataset, tmp_path: Path
) -> None:
    (tmp_path / "predictions.pth").mkdir()  # a file cannot replace it
    report = tmp_path / "report.html"
    with pytest.raises(ConfigError, match=r"Is a directory.*bbox/AP -1.*segm/AP -1"):
        _evaluator(dataset).evaluate(tmp_path, report=report)
    names = {"bbox.json", "segm.json", "coco_results.pth", "report.html", "predictions.pth"}
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.fixture(scope="module")
def model() -> MaskRCNN:
    """Model with random weights that detects something everywhere."""
    torch.manual_seed(0)
    return MaskRCNN(
        ModelConfig(
            num_classes=len(CLASSES),
            backbone=BackboneConfig(name="resnet18", norm="bn", frozen_stages=0, fpn_channels=32),
            anchors=AnchorConfig(sizes=(16, 32, 64, 128, 256)),
            rpn=RpnConfig(pre_nms_top_n_test=50, post_nms_top_n_test=20),
            roi=RoiConfig(
                box_head_dim=32, mask_head_dim=32, mask_head_depth=1, max_detections=8,
                score_threshold=0.2,
            ),
        )
    )  # fmt: skip


def test_model_is_evaluated_in_source_pixels(
    folder: Path, dataset: CocoDataset, model: MaskRCNN, tmp_path: Path
) -> None:
    batches = eval_loader(dataset, _train_config(folder))
    model.train()
    model.backbone.body.eval()
    evaluator = _evaluator(dataset)
    evaluate_model(model, batches, evaluator, CPU)
    assert model.training
    assert model.rpn.training
    assert not model.backbone.body.bn1.training
    assert set(evaluator.evaluate(tmp_path)) >= {"bbox/AP", "segm/AP"}
    boxes = json.loads((tmp_path / "bbox.json").read_text())
    masks = json.loads((tmp_path / "segm.json").read_text())
    expected = _results_by_torchvision(model.eval(), eval_loader(dataset, _train_config(folder)))
    assert len(boxes) == len(masks) == len(expected) > len(dataset)
    for box, mask, (image_id, label, score, bbox, segmentation) in zip(
        boxes, masks, expected, strict=True
    ):
        category = dataset.categories[label - 1].id
        assert (box["image_id"], box["category_id"]) == (image_id, category)
        assert (mask["image_id"], mask["category_id"]) == (image_id, category)
        assert box["score"] == mask["score"] == score
        assert box["bbox"] == pytest.approx(bbox, abs=1e-4)
        assert mask["segmentation"]["size"] == segmentation["size"]
        areas = coco_mask.area([mask["segmentation"], segmentation])
        overlap = coco_mask.iou([mask["segmentation"]], [segmentation], [0])[0, 0]
        assert overlap > 0.999 or not areas.any()


@pytest.mark.parametrize("limited", [False, True])
def test_warns_if_the_candidate_limit_may_have_left_out_detections(
    folder: Path,
    dataset: CocoDataset,
    model: MaskRCNN,
    caplog: pytest.LogCaptureFixture,
    *,
    limited: bool,
) -> None:
    roi = model.config.roi.model_copy(update={"max_detections": 100})
    if limited:
        roi = roi.model_copy(update={"nms_candidates": 5})
    own = MaskRCNN(model.config.model_copy(update={"roi": roi}))
    own.load_state_dict(model.state_dict())
    evaluator = _evaluator(dataset)
    evaluate_model(own, eval_loader(dataset, _train_config(folder)), evaluator, CPU)
    evaluator.evaluate(measure=False)
    assert (f"in {len(dataset)} images" in caplog.text) == limited
    assert ("roi.nms_candidates" in caplog.text) == limited


@torch.inference_mode()
def _results_by_torchvision(model: MaskRCNN, batches: Any) -> list[tuple[Any, ...]]:
    results = []
    for batch in batches:
        found = model.detect(batch.images, batch.image_sizes)
        for n, image_id in enumerate(batch.image_ids.tolist()):
            count = int(found.num_detections[n])
            source = tuple(batch.source_sizes[n].tolist())
            boxes = resize_boxes(found.boxes[n, :count], batch.image_sizes[n].tolist(), source)
            pasted = paste_masks_in_image(found.masks[n, :count, None], boxes, source)
            for box, label, score, mask in zip(
                boxes.tolist(), found.labels[n].tolist(), found.scores[n].tolist(), pasted,
                strict=False,
            ):  # fmt: skip
                runs = coco_mask.encode(np.asfortranarray((mask[0] > 0.5).numpy(), np.uint8))
                x1, y1, x2, y2 = box
                results.append((image_id, label, score, [x1, y1, x2 - x1, y2 - y1], runs))
    return sorted(results, key=lambda result: result[0])


def test_lower_precision_is_evaluated(
    folder: Path, dataset: CocoDataset, model: MaskRCNN, tmp_path: Path
) -> None:
    batches = eval_loader(dataset, _train_config(folder))
    exact, rough = tmp_path / "exact", tmp_path / "rough"
    for out, autocast in ((exact, None), (rough, torch.bfloat16)):
        evaluator = _evaluator(dataset)
        evaluate_model(model, batches, evaluator, CPU, autocast)
        assert evaluator.evaluate(out, measure=False) == {}
    first, second = (
        [result["score"] for result in json.loads((out / "segm.json").read_text())]
        for out in (exact, rough)
    )
    assert first != second
    assert np.mean(first) == pytest.approx(np.mean(second), abs=0.05)
