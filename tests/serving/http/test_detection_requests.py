"""`/v1/detect`: JSON and annotated images, compared with the gRPC service."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from pathlib import Path

import httpx
import numpy as np
import pytest
import schemathesis
from bundle_copies import linked_copy
from http_server import HttpAddress, served_over_http
from hypothesis import HealthCheck, given, settings
from PIL import Image
from schemathesis import checks
from server_load import wait_until
from triton_requests import MODEL

import maskrcnn_trt.serving
from maskrcnn_trt.serving.client import DetectorClient
from maskrcnn_trt.serving.detections import DetectionOptions, Detections, MaskFormat
from maskrcnn_trt.serving.pipeline.served_model import ModelSource
from maskrcnn_trt.serving.result_formats import draw_detections

Encode = Callable[..., bytes]


@pytest.fixture(scope="module")
def server(
    bundle: Path, picture: Encode, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HttpAddress]:
    """Server of a bundle with a sample image."""
    own = tmp_path_factory.mktemp("bundle") / "bundle"
    shutil.copytree(bundle, own, copy_function=shutil.copy)
    (own / "samples").mkdir()
    (own / "samples" / "one.png").write_bytes(picture(codec="PNG"))
    (own / "samples" / "notes.txt").write_text("not an image")
    (own / "samples" / os.fsdecode(b"bad\xff.jpg")).write_bytes(picture())
    (own / "samples" / "secret.jpg").symlink_to(own / "manifest.json")
    with served_over_http(own, max_batch=4, max_message_mb=1) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: HttpAddress) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def expected(server: HttpAddress, image: bytes, options: DetectionOptions) -> Detections:
    with DetectorClient(server.grpc) as client:
        return client.detect(image, options)


def test_detections_with_rle(server: HttpAddress, http: httpx.Client, picture: Encode) -> None:
    options = DetectionOptions(score_threshold=0.3, max_detections=4)
    found = expected(server, picture(), options)
    assert len(found) > 1
    assert found.rles is not None
    query = {"score_threshold": 0.3, "max_detections": 4, "precision": "fp32", "priority": 1}
    response = http.post("/v1/detect", params=query, content=picture())
    assert response.status_code == 200
    body = response.json()
    assert (body["height"], body["width"]) == (found.height, found.width)
    records = body["detections"]
    assert [record["class_name"] for record in records] == list(found.class_names)
    assert [record["label"] for record in records] == found.labels.tolist()
    assert [record["category_id"] for record in records] == found.category_ids.tolist()
    np.testing.assert_allclose([r["score"] for r in records], found.scores, rtol=1e-6)
    np.testing.assert_allclose([r["box"] for r in records], found.boxes, rtol=1e-6)
    size = [found.height, found.width]
    assert [r["segmentation"] for r in records] == [
        {"size": size, "counts": rle.counts.decode()} for rle in found.rles
    ]
    assert body["timing"]["infer_us"] > 0
    assert "infer;dur=" in response.headers["server-timing"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_commands_of_the_page(server: HttpAddress, picture: Encode, tmp_path: Path) -> None:
    (tmp_path / "street.jpg").write_bytes(picture())
    page = (Path(maskrcnn_trt.serving.__file__).parent / "README.md").read_text()
    as_json, as_png = (
        command.replace("curl", "curl --silent --fail").replace("localhost:8080", server.url)
        for command in re.findall(r"^curl .+$", page, re.MULTILINE)
    )
    run = partial(subprocess.run, shell=True, check=True, cwd=tmp_path, timeout=60)
    found = expected(server, picture(), DetectionOptions())
    detections = json.loads(run(as_json, capture_output=True).stdout)["detections"]
    assert [record["label"] for record in detections] == found.labels.tolist()
    run(as_png)
    with Image.open(tmp_path / "detections.png") as drawn:
        assert (drawn.format, drawn.size) == ("PNG", (found.width, found.height))


def test_detections_with_polygons_and_without_masks(
    server: HttpAddress, http: httpx.Client, picture: Encode
) -> None:
    found = expected(server, picture(), DetectionOptions(mask_format=MaskFormat.POLYGON))
    assert found.polygons is not None
    response = http.post("/v1/detect?mask_format=polygon", content=picture())
    assert [record["segmentation"] for record in response.json()["detections"]] == [
        [outline.ravel().tolist() for outline in outlines] for outlines in found.polygons
    ]
    response = http.post("/v1/detect?mask_format=none", content=picture())
    assert len(response.json()["detections"]) == len(found)
    assert not any("segmentation" in record for record in response.json()["detections"])


def test_annotated_image(server: HttpAddress, http: httpx.Client, picture: Encode) -> None:
    image = picture(codec="PNG")
    found = expected(server, image, DetectionOptions(max_detections=3))
    response = http.post(
        "/v1/detect?max_detections=3", content=image, headers={"Accept": "image/png"}
    )
    assert response.headers["content-type"] == "image/png"
    pixels = np.array(Image.open(BytesIO(image)))
    drawn = np.array(Image.open(BytesIO(response.content)))
    np.testing.assert_array_equal(drawn, draw_detections(pixels, found))


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("image/png, application/json", "image/png"),
        ("application/json, image/png", "application/json"),
        ("image/png;q=0.1, application/json", "application/json"),
        ("application/json; q=0.5, image/png; q=0.75", "image/png"),
        ("image/png;q=0.000", "application/json"),
        ("Image/PNG;q=x, application/json;q=0.9", "image/png"),
        ("*/*", "application/json"),
    ],
)
def test_accept_header(http: httpx.Client, picture: Encode, accept: str, kind: str) -> None:
    response = http.post("/v1/detect", content=picture(), headers={"Accept": accept})
    assert response.headers["content-type"] == kind


def test_request_ids_are_returned(http: httpx.Client) -> None:
    ids = [
        http.get("/v1/model", headers={"x-request-id": sent}).headers["x-request-id"]
        for sent in ("mine-1", "not valid")
    ]
    assert ids[0] == "mine-1"
    assert len(ids[1]) == 32


def test_model_and_samples(http: httpx.Client, picture: Encode) -> None:
    model = http.get("/v1/model").json()
    assert model["name"] == MODEL
    assert model["categories"][0] == {"id": 3, "name": "disc"}
    assert http.get("/v1/samples").json() == ["one.png"]
    sample = http.get("/v1/samples/one.png")
    assert sample.content == picture(codec="PNG")
    assert sample.headers["content-type"] == "image/png"
    for name in ("notes.txt", "..%2Fmanifest.json", "one.png%00", "secret.jpg", "bad%FF.jpg"):
        assert http.get(f"/v1/samples/{name}").status_code == 404


def test_samples_come_from_the_served_version(bundle: Path, tmp_path: Path) -> None:
    served = linked_copy(bundle, tmp_path / "1")
    (served / "samples").mkdir()
    (served / "samples" / "old.png").touch()
    with (
        served_over_http([ModelSource(tmp_path, MODEL, version=None)]) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        newer = linked_copy(bundle, tmp_path / "2")
        (newer / "samples").mkdir()
        (newer / "samples" / "new.png").touch()
        assert http.get("/v1/samples").json() == ["old.png"]
        shutil.rmtree(newer)
        shutil.rmtree(served)
        response = http.get("/v1/samples")
        assert (response.status_code, response.json()) == (200, [])


@pytest.mark.parametrize(
    ("query", "status", "word"),
    [
        ("score_threshold=2", 400, "0..1"),
        ("score_threshold=nan", 400, "score_threshold"),
        ("max_detections=0", 400, "max_detections"),
        ("max_detections=99999999999", 400, "max_detections"),
        ("mask_format=png", 400, "mask_format"),
        ("precision=fp8", 404, "fp8"),
        (f"precision=fp16&model={MODEL}-fp32", 400, "leave out precision"),
        ("priority=9", 400, "priority"),
        ("timeout_us=1", 504, "time limit"),
        ("treshold=0.5", 400, "score_threshold"),
        ("score_threshold=0.9&score_threshold=0", 400, "twice"),
    ],
)
def test_invalid_queries_are_rejected(
    http: httpx.Client, picture: Encode, query: str, status: int, word: str
) -> None:
    response = http.post(f"/v1/detect?{query}", content=picture())
    assert response.status_code == status
    assert word in response.json()["error"]


@pytest.mark.parametrize("path", ["model", "samples", "samples/one.png"])
def test_unknown_parameters_are_rejected(http: httpx.Client, path: str) -> None:
    response = http.get(f"/v1/{path}?mdel=x")
    assert response.status_code == 400
    assert "mdel" in response.json()["error"]


@pytest.mark.parametrize("accept", ["application/json", "image/png"])
def test_invalid_images_are_rejected(http: httpx.Client, picture: Encode, accept: str) -> None:
    for body in (b"", b"no image", picture()[:-100]):
        response = http.post("/v1/detect", content=body, headers={"Accept": accept})
        assert response.status_code == 400
        assert "image" in response.json()["error"]


def test_forms_and_compressed_bodies_are_rejected(
    http: httpx.Client, picture: Encode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "maskrcnn_trt.serving")
    response = http.post("/v1/detect", files={"file": picture()})
    assert response.status_code == 415
    assert "--data-binary" in response.json()["error"]

    def is_rejected_and_logged() -> bool:
        response = http.post("/v1/detect", content=b"x", headers={"Content-Encoding": "gzip"})
        assert response.status_code == 415
        errors = [getattr(record, "error", "") for record in caplog.records]
        return any(error.startswith("HTTP status 415:") for error in errors)

    # Only ten failed requests per second are logged, including those of earlier tests.
    wait_until(is_rejected_and_logged)


@pytest.mark.slow
def test_responses_conform_to_the_openapi_document(server: HttpAddress) -> None:
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    # Requests for /repository/models/ could unload the model.
    for operation in document.exclude(path_regex="/repository/models/").get_all_operations():

        @settings(
            max_examples=12,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(operation.ok().as_strategy())
        def check(case: schemathesis.Case) -> None:
            response = case.call()
            assert response.status_code != 500
            case.validate_response(
                response,
                checks=[
                    checks.status_code_conformance,
                    checks.content_type_conformance,
                    checks.response_schema_conformance,
                ],
            )

        check()
