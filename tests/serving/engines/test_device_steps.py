"""Steps on the backend's device, a GPU if there is one, compared with the steps on the CPU."""

from collections.abc import Iterator, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.ops import box_iou

from maskrcnn_trt.model.bundle.manifest import Manifest, read_manifest
from maskrcnn_trt.model.image_limits import ImageError
from maskrcnn_trt.serving.backends.torch import TorchBackend
from maskrcnn_trt.serving.detections import (
    DEFAULT_OPTIONS,
    DetectionOptions,
    Detections,
    MaskFormat,
    TimedResponse,
    not_encoded,
)
from maskrcnn_trt.serving.engines.base import ImageRequest, Outcome, SourceImage, StepChain
from maskrcnn_trt.serving.engines.bundle_engine import DeviceEngine
from maskrcnn_trt.serving.engines.device_steps import DeviceSteps
from maskrcnn_trt.serving.engines.host_steps import HostSteps, plan_image
from maskrcnn_trt.serving.messages import encode_detections
from maskrcnn_trt.serving.offline import batch_steps, detect_many, run_in_batches

LANDSCAPE, PORTRAIT = (120, 200), (200, 120)


@pytest.fixture(scope="module")
def manifest(torch_bundle: Path) -> Manifest:
    return read_manifest(torch_bundle)


@pytest.fixture(scope="module")
def backend(torch_bundle: Path, manifest: Manifest) -> Iterator[TorchBackend]:
    backend = TorchBackend(torch_bundle, manifest, "fp32", max_batch=4)
    yield backend
    backend.close()


def smooth(seed: int, size: tuple[int, int], codec: str = "JPEG", **options: object) -> bytes:
    """Encode an image of smooth colours, which all decoders decode alike."""
    tiles = np.random.default_rng(seed).integers(0, 256, (5, 5, 3), np.uint8)
    image = Image.fromarray(tiles).resize(size[::-1], Image.Resampling.BICUBIC)
    file = BytesIO()
    image.convert(str(options.pop("mode", "RGB"))).save(file, codec, **options)
    return file.getvalue()


def planned(
    images: Sequence[SourceImage],
    backend: TorchBackend,
    manifest: Manifest,
    options: DetectionOptions,
) -> list[ImageRequest]:
    preprocessing, buckets = manifest.preprocessing, backend.buckets
    return [ImageRequest(plan_image(i, preprocessing, buckets), options) for i in images]


def both_ways(
    images: Sequence[SourceImage],
    backend: TorchBackend,
    manifest: Manifest,
    options: DetectionOptions = DEFAULT_OPTIONS,
    **device_options: int,
) -> Iterator[tuple[Outcome, Outcome]]:
    """Return the outcomes of the steps on the device, and of those on the host."""
    requests = planned(images, backend, manifest, options)
    on_device = DeviceSteps(backend, manifest, **device_options)
    on_host = HostSteps(backend, manifest, threads=2)
    outcomes = [list(run_in_batches(requests, own, max_batch=4)) for own in (on_device, on_host)]
    assert len(outcomes[0]) == len(images)
    return zip(*outcomes, strict=True)


def assert_same(own: Outcome, other: Outcome) -> None:
    assert isinstance(own, Detections)
    assert isinstance(other, Detections)
    assert len(own) > 0
    assert (own.height, own.width) == (other.height, other.width)
    assert own.class_names == other.class_names
    np.testing.assert_array_equal(own.category_ids, other.category_ids)
    np.testing.assert_allclose(own.boxes, other.boxes, atol=1e-2)
    np.testing.assert_allclose(own.scores, other.scores, atol=1e-4)


def assert_alike(own: Outcome, other: Outcome) -> None:
    """Assert that most detections of one outcome are also in the other.

    Masks are not compared, because a model with random weights gives probabilities near one half.
    """
    assert isinstance(own, Detections)
    assert isinstance(other, Detections)
    assert (own.height, own.width) == (other.height, other.width)
    assert own.rles is not None
    overlaps = box_iou(torch.from_numpy(own.boxes), torch.from_numpy(other.boxes))
    overlaps[torch.from_numpy(own.labels[:, None] != other.labels)] = 0
    assert (overlaps.amax(dim=1) > 0.9).float().mean() >= 0.8
    assert {(rle.height, rle.width) for rle in own.rles} == {(own.height, own.width)}


def test_images_decoded_on_the_host(backend: TorchBackend, manifest: Manifest) -> None:
    images = [smooth(n, size, "PNG") for n, size in enumerate([LANDSCAPE, PORTRAIT, LANDSCAPE])]
    images.append(smooth(3, LANDSCAPE, mode="CMYK"))
    for options in ({}, {"run_capacity": 3}):  # 3: fewer than the masks have
        for own, other in both_ways(images, backend, manifest, **options):
            assert_same(own, other)
            assert isinstance(own, Detections)
            assert isinstance(other, Detections)
            assert own.rles == other.rles


@pytest.mark.gpu
def test_masks_are_encoded_again_before_the_next_batch(
    backend: TorchBackend, manifest: Manifest
) -> None:
    """Masks that exceed the buffers do not wait for GPU work that was queued later."""
    requests = planned([smooth(0, LANDSCAPE, "PNG")], backend, manifest, DEFAULT_OPTIONS)
    steps = DeviceSteps(backend, manifest, run_capacity=3)
    # The first batch loads the kernels, which would wait for the work that is queued later.
    list(run_in_batches(requests, steps, max_batch=1))
    batch: Any = requests
    for step in steps.steps[:-1]:
        batch = step.run(batch)
    later = torch.cuda.Event()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(steps._pasting):
        torch.cuda._sleep(1 << 31)  # type: ignore[no-untyped-call]
        later.record()
    steps.steps[-1].run(batch)
    assert not later.query()
    steps.synchronize()


def test_images_resized_by_the_rule_of_torchvision(
    backend: TorchBackend, manifest: Manifest
) -> None:
    preprocessing = manifest.preprocessing.model_copy(update={"resize": "torchvision"})
    floats = manifest.model_copy(update={"preprocessing": preprocessing})
    images = [smooth(0, LANDSCAPE, "PNG"), smooth(1, LANDSCAPE, subsampling=0)]
    (own, other), (from_device, from_host) = both_ways(images, backend, floats)
    assert_same(own, other)
    assert_alike(from_device, from_host)


def test_images_decoded_on_the_device(backend: TorchBackend, manifest: Manifest) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    images = [
        smooth(0, LANDSCAPE, subsampling=0),
        smooth(1, (75, 133), mode="L"),
        smooth(2, LANDSCAPE, subsampling=0, exif=exif),
        smooth(3, LANDSCAPE, subsampling=0, progressive=True),
        smooth(4, LANDSCAPE, "WEBP", lossless=True),
        smooth(5, PORTRAIT, subsampling=0),
    ]
    for own, other in both_ways(images, backend, manifest):
        assert_alike(own, other)


def test_damaged_files_in_a_batch(backend: TorchBackend, manifest: Manifest) -> None:
    whole = smooth(0, LANDSCAPE, subsampling=0)
    cut_off = whole[: len(whole) * 3 // 4]
    without_tables = whole.replace(b"\xff\xdb", b"\xff\xe9").replace(b"\xff\xc4", b"\xff\xe9")
    images = [whole, cut_off, without_tables, whole]
    outcomes = list(both_ways(images, backend, manifest))
    for own, other in (outcomes[1], outcomes[2]):
        assert isinstance(own, ImageError)
        assert str(own) == str(other)
    assert_alike(*outcomes[0])
    assert_alike(*outcomes[3])


def test_options_apply(backend: TorchBackend, manifest: Manifest) -> None:
    images = [smooth(1, LANDSCAPE, "PNG")]
    for masks in MaskFormat:
        options = DetectionOptions(score_threshold=0.25, max_detections=3, mask_format=masks)
        ((own, other),) = both_ways(images, backend, manifest, options)
        assert_same(own, other)
        assert isinstance(own, Detections)
        assert isinstance(other, Detections)
        assert own.rles == other.rles
        assert (own.mask_probabilities is None) == (masks is not MaskFormat.PROBABILITIES)
        if own.mask_probabilities is not None and other.mask_probabilities is not None:
            np.testing.assert_allclose(own.mask_probabilities, other.mask_probabilities, atol=1e-4)
        assert (own.polygons is None) == (masks is not MaskFormat.POLYGON)
        if own.polygons is not None and other.polygons is not None:
            assert any(own.polygons)
            for outlines, expected in zip(own.polygons, other.polygons, strict=True):
                for outline, corners in zip(outlines, expected, strict=True):
                    np.testing.assert_allclose(outline, corners, atol=1e-2)


def test_options_of_each_image_in_a_batch(backend: TorchBackend, manifest: Manifest) -> None:
    option_sets = [
        DetectionOptions(max_detections=n, mask_format=m) for n, m in enumerate(MaskFormat, 1)
    ]
    images = [smooth(1, LANDSCAPE, "PNG")] * len(option_sets)
    requests = [
        ImageRequest(request.image, options)
        for request, options in zip(
            planned(images, backend, manifest, option_sets[0]), option_sets, strict=True
        )
    ]
    steps = DeviceSteps(backend, manifest)
    mixed = list(run_in_batches(requests, steps, max_batch=4))
    for request, own in zip(requests, mixed, strict=True):
        (other,) = run_in_batches([request], steps, max_batch=4)
        assert_same(own, other)
        assert isinstance(own, Detections)
        assert isinstance(other, Detections)
        assert len(own) == request.options.max_detections
        assert own.rles == other.rles
        assert (own.mask_probabilities is None) == (other.mask_probabilities is None)
        assert (own.polygons is None) == (other.polygons is None)


@pytest.mark.parametrize(
    ("run_capacity", "serialised"),
    [(1 << 14, [True, True, True, False]), (3, [False, True, False, False])],
)
def test_device_serialises_responses_whose_masks_fit(
    run_capacity: int, serialised: list[bool], backend: TorchBackend, manifest: Manifest
) -> None:
    option_sets = [
        DEFAULT_OPTIONS,
        DetectionOptions(score_threshold=1),
        DetectionOptions(score_threshold=0.25, max_detections=2),
        DetectionOptions(mask_format=MaskFormat.POLYGON),
    ]
    images = planned(
        [smooth(n, LANDSCAPE, "PNG") for n in range(4)], backend, manifest, DEFAULT_OPTIONS
    )
    requests = [
        ImageRequest(request.image, options, encode_detections)
        for request, options in zip(images, option_sets, strict=True)
    ]
    steps = DeviceSteps(backend, manifest, run_capacity=run_capacity)
    results = StepChain(steps)(requests)
    assert [isinstance(result, TimedResponse) for result in results] == serialised
    expected = StepChain(steps)([request._replace(encoder=not_encoded) for request in requests])
    # The other requests of a batch do not change the response to a request.
    mixed = [requests[0]._replace(encoder=not_encoded), *requests[1:]]
    for batch in (requests, mixed):
        responses = DeviceEngine(backend, steps).compute(batch)
        for request, response, detections in zip(batch, responses, expected, strict=True):
            assert isinstance(response, TimedResponse)
            assert response.timing.batch_size == 4
            own = response.value
            if request.encoder is not_encoded:
                own = encode_detections(own)
            assert own == encode_detections(detections)


def test_pixels_need_no_decoding(backend: TorchBackend, manifest: Manifest) -> None:
    images = [
        np.frombuffer(np.random.default_rng(0).bytes(h * w * 3), np.uint8).reshape(h, w, 3)
        for h, w in ((120, 200), (96, 160))  # one to resize, one of the model's input size
    ]
    for own, other in both_ways(images, backend, manifest):
        assert_same(own, other)


def test_timing_of_each_stage(backend: TorchBackend, manifest: Manifest) -> None:
    requests = planned([smooth(0, LANDSCAPE)] * 3, backend, manifest, DEFAULT_OPTIONS)
    for outcome in run_in_batches(requests, DeviceSteps(backend, manifest), max_batch=4):
        assert isinstance(outcome, Detections)
        timing = outcome.timing
        assert min(timing.decode_us, timing.infer_us, timing.encode_us) > 0
        assert timing.batch_size == 3


@pytest.mark.gpu
def test_waiting_for_the_previous_batch_is_queue_time(
    backend: TorchBackend, manifest: Manifest
) -> None:
    requests = planned([smooth(0, LANDSCAPE)], backend, manifest, DEFAULT_OPTIONS)
    steps = DeviceSteps(backend, manifest)
    for _ in range(2):  # the first batch captures the model's CUDA graph
        (outcome,) = run_in_batches(requests, steps, max_batch=1)
        with torch.cuda.stream(steps._computing):
            torch.cuda._sleep(10**9)
    assert isinstance(outcome, Detections)
    assert outcome.timing.queue_us > 100_000 > outcome.timing.infer_us


def test_no_detections(backend: TorchBackend, manifest: Manifest) -> None:
    options = DetectionOptions(score_threshold=1)
    for own, _ in both_ways([smooth(0, LANDSCAPE)], backend, manifest, options):
        assert isinstance(own, Detections)
        assert len(own) == 0
        assert own.rles == ()


@pytest.mark.gpu
def test_interleaved_runs_do_not_mix(backend: TorchBackend, manifest: Manifest) -> None:
    """All runs use the same CUDA graphs, each from streams of its own."""
    images = [smooth(n, LANDSCAPE) for n in range(8)]
    alone = list(detect_many(images, backend, manifest, max_batch=4))
    runs = [detect_many(own * 20, backend, manifest, max_batch=4) for own in (images, images[::-1])]
    for n, (first, second) in enumerate(zip(*runs, strict=True)):
        assert_alike(first, alone[n % 8])
        assert_alike(second, alone[7 - n % 8])


def test_concurrent_batches_do_not_mix_in_steps(backend: TorchBackend, manifest: Manifest) -> None:
    count = 210 if torch.cuda.is_available() else 14  # on the CPU nothing overlaps
    images = [
        smooth(n % 7, (LANDSCAPE, PORTRAIT)[n % 7 % 3 == 0], subsampling=0) for n in range(count)
    ]
    assert isinstance(batch_steps(backend, manifest, threads=2), DeviceSteps)
    alone = [outcome for outcome, _ in both_ways(images, backend, manifest)]
    images *= 30 if torch.cuda.is_available() else 2  # on the CPU nothing overlaps
    for n, own in enumerate(detect_many(images, backend, manifest, max_batch=4)):
        assert_alike(own, alone[n % 7])


def test_iteration_can_be_abandoned(backend: TorchBackend, manifest: Manifest) -> None:
    results = detect_many([smooth(0, LANDSCAPE)] * 100, backend, manifest, max_batch=4)
    first = next(iter(results))
    del results
    assert_alike(next(iter(detect_many([smooth(0, LANDSCAPE)], backend, manifest))), first)
