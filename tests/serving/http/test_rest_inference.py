"""Open Inference Protocol over REST: Triton's HTTP client, JSON, and invalid requests."""

import base64
import json
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from http_server import HttpAddress, served_over_http
from PIL import Image
from triton_requests import MODEL
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from maskrcnn_trt.protos.inference import open_inference_pb2 as pb
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.http.open_inference_json import BinaryOutputs, http_from_infer_response
from maskrcnn_trt.serving.offline import Detector

Encode = Callable[..., bytes]
INFER = f"/v2/models/{MODEL}/infer"


@pytest.fixture(scope="module")
def server(bundle: Path) -> Iterator[HttpAddress]:
    with served_over_http(bundle, max_batch=4, max_message_mb=2) as server:
        yield server


@pytest.fixture(scope="module")
def triton(server: HttpAddress) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(server.url.removeprefix("http://")) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: HttpAddress) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def expected(predictor: Detector, picture: Encode) -> Detections:
    detections = predictor.detect(picture())
    assert detections.rles is not None
    assert len(detections) > 3
    return detections


def images_of(*images: bytes) -> list[InferInput]:
    array = np.array(images, np.object_)
    return [InferInput("images", array.shape, "BYTES").set_data_from_numpy(array)]


def assert_row_is(value: Callable[[str], Any], row: int, expected: Detections) -> None:
    count = len(expected)
    assert value("num_detections")[row].tolist() == [count]
    np.testing.assert_allclose(value("boxes")[row][:count], expected.boxes, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(value("scores")[row][:count], expected.scores, rtol=1e-5)
    assert value("labels")[row][:count].tolist() == expected.labels.tolist()
    masks = value("masks")[row][:count].tolist()
    counts = [rle.counts for rle in expected.rles or ()]
    assert [mask if isinstance(mask, bytes) else mask.encode() for mask in masks] == counts


def test_triton_client_infers_a_batch(
    triton: InferenceServerClient, picture: Encode, expected: Detections
) -> None:
    result = triton.infer(MODEL, images_of(picture(1), picture()), request_id="seven")
    assert result.get_response()["id"] == "seven"
    assert all("binary_data_size" in o["parameters"] for o in result.get_response()["outputs"])
    assert_row_is(result.as_numpy, 1, expected)


def test_triton_client_gets_json_outputs_and_sends_parameters(
    triton: InferenceServerClient, picture: Encode, expected: Detections
) -> None:
    threshold = float(np.median(expected.scores))
    names = "num_detections", "scores", "labels", "boxes", "masks", "image_sizes"
    outputs = [InferRequestedOutput(name, binary_data=name == "scores") for name in names]
    result = triton.infer(
        MODEL,
        images_of(picture()),
        outputs=outputs,
        parameters={"score_threshold": threshold, "max_detections": 2},
        priority=1,
        timeout=60_000_000,
    )
    count = min(2, sum(expected.scores > threshold))
    assert result.as_numpy("num_detections").tolist() == [[count]]
    assert result.as_numpy("image_sizes").tolist() == [[expected.height, expected.width]]
    np.testing.assert_allclose(result.as_numpy("scores")[0, :count], expected.scores[:count])
    np.testing.assert_allclose(result.as_numpy("boxes")[0, :count], expected.boxes[:count])
    binary = [o["name"] for o in result.get_response()["outputs"] if "parameters" in o]
    assert binary == ["scores"]


@pytest.mark.parametrize("datatype", ["UINT8", "FP32"])
@pytest.mark.parametrize("binary", [True, False])
def test_pixels(
    triton: InferenceServerClient, picture: Encode, bundle: Path, datatype: str, binary: bool
) -> None:
    data = picture(2, (40, 64), codec="PNG")
    pixels = np.array(Image.open(BytesIO(data)))[None]
    tensor = InferInput("images", pixels.shape, datatype)
    dtype = np.uint8 if datatype == "UINT8" else np.float32
    tensor.set_data_from_numpy(pixels.astype(dtype), binary_data=binary)
    (encoded,) = images_of(data)
    result, other = triton.infer(MODEL, [tensor]), triton.infer(MODEL, [encoded])
    for name in ("num_detections", "boxes", "masks"):
        np.testing.assert_array_equal(result.as_numpy(name), other.as_numpy(name))


def test_json_with_base64_and_a_version(
    http: httpx.Client, picture: Encode, expected: Detections
) -> None:
    text = base64.b64encode(picture()).decode()
    tensor = {"name": "images", "shape": [1, 1], "datatype": "BYTES", "data": [[text]]}
    # KServe's client also sends the model's name.
    request = {"id": "a", "model_name": MODEL, "inputs": [tensor]}
    response = http.post(f"/v2/models/{MODEL}-fp32/versions/1/infer", json=request)
    assert response.status_code == 200
    body = response.json()
    assert (body["model_name"], body["model_version"], body["id"]) == (f"{MODEL}-fp32", "1", "a")
    outputs = {output["name"]: output for output in body["outputs"]}

    def value(name: str) -> Any:
        return np.array(outputs[name]["data"]).reshape(outputs[name]["shape"])

    assert_row_is(value, 0, expected)


def test_triton_client_reads_health_metadata_and_statistics(
    triton: InferenceServerClient, picture: Encode
) -> None:
    assert triton.is_server_live()
    assert triton.is_server_ready()
    assert triton.is_model_ready(MODEL)
    assert triton.is_model_ready(MODEL, "1")
    assert not triton.is_model_ready("other")
    assert "binary_tensor_data" in triton.get_server_metadata()["extensions"]
    metadata = triton.get_model_metadata(MODEL)
    assert metadata["inputs"] == [{"name": "images", "datatype": "BYTES", "shape": [-1, 1]}]
    assert json.loads(metadata["properties"]["class_names"]) == ["disc", "box", "ring"]
    config = triton.get_model_config(MODEL)
    assert config["max_batch_size"] == 4
    assert config["input"][0]["data_type"] == "TYPE_STRING"
    before = triton.get_inference_statistics(MODEL)["model_stats"][0]["inference_count"]
    triton.infer(MODEL, images_of(picture(), picture()))
    (statistics,) = triton.get_inference_statistics(MODEL)["model_stats"]
    assert statistics["inference_count"] == before + 2
    assert len(triton.get_inference_statistics()["model_stats"]) == 2
    assert {model["name"] for model in triton.get_model_repository_index()} == {
        MODEL,
        f"{MODEL}-fp32",
    }


def test_unload_and_load(triton: InferenceServerClient, picture: Encode) -> None:
    triton.unload_model(MODEL)
    assert not triton.is_server_ready()
    with pytest.raises(InferenceServerException, match="unloaded") as caught:
        triton.infer(MODEL, images_of(picture()))
    assert caught.value.status() == "503"
    triton.load_model(MODEL)
    assert triton.infer(MODEL, images_of(picture())).as_numpy("num_detections") > 0
    with pytest.raises(InferenceServerException, match="unknown parameter 'config'"):
        triton.load_model(MODEL, config="{}")


def test_web_pages_cannot_unload_the_model(http: httpx.Client) -> None:
    for headers in ({"Origin": "https://example.com"}, {"Sec-Fetch-Site": "same-origin"}):
        response = http.post(f"/v2/repository/models/{MODEL}/unload", headers=headers)
        assert response.status_code == 403
    assert http.get("/v2/health/ready").status_code == 200


def tensor(**changes: Any) -> dict[str, Any]:
    return {"name": "images", "shape": [1], "datatype": "BYTES", "data": ["aa=="], **changes}


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "inputs"),
        (b"{", "JSON"),
        (b"[" * 100_000, "JSON"),
        (b"[]", "object"),
        (b"\xff\xd8\xff", "JSON"),
        ({"inputs": []}, "exactly one"),
        ({"inputs": [tensor(), tensor()]}, "exactly one"),
        ({"inputs": [tensor(name="other")]}, "exactly one"),
        ({"inputs": [tensor(shape=["1"])]}, "shape"),
        ({"inputs": [tensor(shape=[1 << 70])]}, "shape"),
        ({"inputs": [tensor(shape=[5], data=["aa=="] * 5)]}, "allowed: 1 to 4"),
        ({"inputs": [tensor(shape=[2])]}, "'images' has 1 BYTES elements; its shape [2] needs 2"),
        ({"inputs": [tensor(shape=[-1])]}, "negative"),
        ({"inputs": [tensor(data=["not base64"])]}, "base64"),
        ({"inputs": [tensor(data=[7])]}, "base64"),
        ({"inputs": [tensor(data=["a" * 8, "b" * 8])]}, "has 2 BYTES elements"),
        ({"inputs": [tensor(data=["aGVsbG8="])]}, "images[0]"),
        ({"inputs": [tensor(data=None)]}, "neither"),
        ({"inputs": [tensor(parameters={"binary_data_size": 4})]}, "both"),
        ({"inputs": [tensor(data=None, parameters={"binary_data_size": 4})]}, "from 0 to 0"),
        ({"inputs": [tensor(data=None, parameters={"binary_data_size": "4"})]}, "from 0 to 0"),
        ({"inputs": [tensor(parameters={"content_type": "x"})]}, "content_type"),
        ({"inputs": [tensor(datatype="FP16", shape=[1, 8, 8, 3])]}, "UINT8"),
        ({"inputs": [tensor(datatype="UINT8", shape=[1, 8, 8, 3], data=[1.5])]}, "UINT8"),
        ({"inputs": [tensor(datatype="UINT8", shape=[1, 8, 8, 3], data=["1"])]}, "UINT8"),
        ({"inputs": [tensor(datatype="UINT8", shape=[1, 8, 8, 3], data=[[1], 2])]}, "UINT8"),
        ({"inputs": [tensor(datatype="UINT8", shape=[1, 8, 8, 3], data=[256] * 192)]}, "0..255"),
        (
            {"inputs": [tensor(datatype="FP32", shape=[1, 8, 8, 3], data=[1, 2.5])]},
            "has 2 FP32 elements",
        ),
        ({"inputs": [tensor()], "parameters": {"colour": 1}}, "colour"),
        (
            {"inputs": [tensor()], "parameters": {"priority": None}},
            "priority: Input should be a ",
        ),
        ({"inputs": [tensor()], "parameters": {"priority": 1 << 80}}, "priority"),
        ({"inputs": [tensor()], "outputs": [{"name": "other"}]}, "other"),
        (
            {"inputs": [tensor()], "outputs": [{"name": "masks", "parameters": {"top": 1}}]},
            "top",
        ),
        ({"inputs": [tensor()], "parameters": {"binary_data_output": 1}}, "binary_data_output"),
        (
            {
                "inputs": [tensor()],
                "outputs": [{"name": "masks", "parameters": {"binary_data": 0}}],
            },
            "binary_data",
        ),
        (b'{"id": "\\ud800", "inputs": []}', "JSON"),
        (b"[[" * (1 << 20), "values"),
    ],
)
def test_invalid_bodies_are_rejected(http: httpx.Client, body: Any, word: str) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = http.post(INFER, content=content)
    assert response.status_code == 400
    assert word in response.json()["error"]


@pytest.mark.parametrize("length", ["x", "-1", "1.5", "10000000", "²", "1" * 5000])
def test_invalid_json_lengths_are_rejected(http: httpx.Client, length: str) -> None:
    headers = {"Inference-Header-Content-Length": length.encode()}
    response = http.post(INFER, content=b"{}", headers=headers)
    assert response.status_code == 400
    assert "Inference-Header-Content-Length" in response.json()["error"]


def test_binary_data_beyond_the_sizes_of_the_inputs_is_rejected(http: httpx.Client) -> None:
    text = json.dumps({"inputs": [tensor()]}).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    response = http.post(INFER, content=text + b"abc", headers=headers)
    assert response.status_code == 400
    assert "3 bytes too many" in response.json()["error"]


@pytest.mark.parametrize(
    ("verb", "path", "status"),
    [
        ("GET", "/v3", 404),
        ("GET", "/v2/systemsharedmemory/status", 501),
        ("POST", "/v2/logging", 501),
        ("POST", "/v2/models/other/infer", 404),
        ("GET", f"/v2/models/{MODEL}/versions/2", 404),
        ("GET", "/v2/models/a%2F..%2Fb", 404),
        ("GET", INFER, 405),
        ("DELETE", "/v1/detect", 405),
        ("POST", "/v1/detect/", 404),
    ],
)
def test_unknown_paths_and_methods(http: httpx.Client, verb: str, path: str, status: int) -> None:
    body = {"inputs": [tensor()]} if verb == "POST" else None
    response = http.request(verb, path, json=body)
    assert response.status_code == status
    assert ("; use POST" in response.json()["error"]) == (status == 405)


def test_class_names_of_any_language_are_json_values() -> None:
    name = "Straße".encode()
    output = pb.ModelInferResponse.InferOutputTensor(
        name="class_names", datatype="BYTES", shape=[1]
    )
    response = pb.ModelInferResponse(
        outputs=[output], raw_output_contents=[len(name).to_bytes(4, "little") + name]
    )
    text, _ = http_from_infer_response(
        response, BinaryOutputs(is_default=False, exceptions=frozenset())
    )
    assert json.loads(text)["outputs"][0]["data"] == ["Straße"]
