from typing import Any

import numpy as np
import pytest
import torch

from maskrcnn_trt.plugins.detection_messages import ClassTable, DetectionBatch, detection_messages
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb

CLASSES = ["", "cat", "ä" * 70, "person"]


def class_table(device: str) -> ClassTable:
    rows = [
        pb.Detection(label=n, class_name=name, category_id=10**n).SerializeToString()
        for n, name in enumerate(CLASSES, 1)
    ]
    stride = max(map(len, rows)) + 3
    fields = torch.tensor([list(row.ljust(stride, b"\xff")) for row in rows], dtype=torch.uint8)
    return ClassTable(fields.to(device), torch.tensor(list(map(len, rows)), device=device))


def random_batch(images: int, depth: int, seed: int = 0) -> DetectionBatch:
    """Return detections on the CPU. Some coordinates are zero, and some masks are long."""
    rng = np.random.default_rng(seed)
    boxes = rng.uniform(0, 1000, (images, depth, 4)).astype(np.float32)
    boxes[rng.random(boxes.shape) < 0.3] = 0
    scores = -np.sort(-rng.random((images, depth), np.float32), axis=1)
    lengths = rng.choice(
        [1, 60, 127, 128, 500, 17000], images * depth, p=[0.3, 0.2, 0.2, 0.1, 0.19, 0.01]
    )
    order = rng.permutation(images * depth)
    starts = np.zeros_like(lengths)
    starts[order] = lengths[order].cumsum() - lengths[order]
    return DetectionBatch(
        counts=torch.from_numpy(rng.integers(0, depth + 1, images)),
        boxes=torch.from_numpy(boxes),
        scores=torch.from_numpy(scores),
        labels=torch.from_numpy(rng.integers(1, len(CLASSES) + 1, (images, depth))),
        text=torch.from_numpy(rng.integers(48, 112, lengths.sum(), np.uint8)),
        text_spans=torch.from_numpy(np.stack([starts, lengths], axis=1)),
        sizes=torch.from_numpy(rng.choice([1, 127, 128, 40000], (images, 2))),
        selections=torch.from_numpy(
            np.stack([rng.choice([1, 50, np.inf], images), rng.choice([0, 0.5], images)], axis=1)
        ),
    )


def expected_message(batch: DetectionBatch, image: int) -> bytes:
    """Serialise the detections of an image with protobuf."""
    maximum, threshold = batch.selections[image].tolist()
    response = pb.DetectResponse()
    height, width = batch.sizes[image].tolist()
    depth = batch.scores.shape[1]
    for row in range(int(min(maximum, batch.counts[image].item()))):
        if batch.scores[image, row] <= threshold:
            continue
        label = int(batch.labels[image, row])
        start, length = batch.text_spans[image * depth + row].tolist()
        response.detections.add(
            label=label,
            class_name=CLASSES[label - 1],
            category_id=10**label,
            score=float(batch.scores[image, row]),
            box=pb.Box(
                **dict(
                    zip(
                        ("x_min", "y_min", "x_max", "y_max"),
                        batch.boxes[image, row].tolist(),
                        strict=True,
                    )
                )
            ),
            rle=pb.Rle(
                height=height,
                width=width,
                counts=batch.text[start : start + length].numpy().tobytes(),
            ),
        )
    return response.SerializeToString()


def messages_of(batch: DetectionBatch, capacity: int, device: str) -> list[bytes | int]:
    """Return the bytes of each image, or the length if they do not fit the capacity."""
    moved = DetectionBatch(*(tensor.to(device) for tensor in batch))
    messages, spans = detection_messages(moved, class_table(device), capacity)
    assert len(messages) == capacity
    data = messages.cpu().numpy().tobytes()
    return [
        data[start : start + length] if 0 <= length <= capacity - start else length
        for start, length in spans.tolist()
    ]


@pytest.mark.parametrize(
    ("images", "depth"), [(1, 1), (3, 100), (2, 1023), (2, 2500), (16, 7), (2, 0)]
)
def test_messages_equal_protobuf(images: int, depth: int, device: str) -> None:
    batch = random_batch(images, depth)
    expected = [expected_message(batch, image) for image in range(images)]
    for spare in (0, 100):
        capacity = sum(map(len, expected)) + spare
        assert messages_of(batch, capacity, device) == expected


def test_no_images(device: str) -> None:
    assert messages_of(random_batch(0, 5), 10, device) == []


def test_all_fields_are_zero(device: str) -> None:
    batch = random_batch(1, 3)
    batch = batch._replace(
        counts=torch.tensor([3]),
        boxes=torch.zeros(1, 3, 4),
        scores=torch.zeros(1, 3),
        selections=torch.tensor([[torch.inf, -1.0]], dtype=torch.float64),
    )
    assert messages_of(batch, 100000, device) == [expected_message(batch, 0)]


def test_images_beyond_the_capacity_have_a_length(device: str) -> None:
    batch = random_batch(4, 20, seed=1)._replace(
        counts=torch.full((4,), 20), selections=torch.tensor([[torch.inf, 0.0]] * 4).double()
    )
    expected = [expected_message(batch, image) for image in range(4)]
    found = messages_of(batch, max(map(len, expected)), device)
    for own, message in zip(found, expected, strict=True):
        assert own in (message, len(message))
    assert any(isinstance(own, bytes) for own in found)
    assert any(isinstance(own, int) for own in found)


@pytest.mark.parametrize("fault", ["too many runs", "characters are missing", "label 0", "label 5"])
def test_images_with_incomplete_detections_have_no_bytes(fault: str, device: str) -> None:
    batch = random_batch(3, 4, seed=2)._replace(
        counts=torch.full((3,), 4), selections=torch.tensor([[torch.inf, 0.0]] * 3).double()
    )
    expected: list[Any] = [expected_message(batch, image) for image in range(3)]
    expected[1] = -1
    changed = 1 * 4 + 2
    if fault == "too many runs":
        batch.text_spans[changed, 1] = -1
    elif fault == "characters are missing":
        batch.text_spans[changed, 1] = len(batch.text) - batch.text_spans[changed, 0] + 1
    else:
        batch.labels[1, 2] = int(fault[-1])
    assert messages_of(batch, 10**6, device) == expected
    # Detections that are not selected do not matter.
    batch.selections[1, 0] = 2
    assert messages_of(batch, 10**6, device)[1] not in (-1, b"")


@pytest.mark.gpu
def test_wrong_arguments_are_rejected_on_a_gpu() -> None:
    batch = DetectionBatch(*(tensor.to("cuda") for tensor in random_batch(1, 3)))
    with pytest.raises(ValueError, match="labels must be"):
        detection_messages(batch._replace(labels=batch.labels.int()), class_table("cuda"), 100)
    spans = batch.text_spans[1:]
    with pytest.raises(ValueError, match="text_spans must be"):
        detection_messages(batch._replace(text_spans=spans), class_table("cuda"), 100)
