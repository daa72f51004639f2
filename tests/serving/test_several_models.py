"""Several bundles behind one server: names, separate queues, load and unload, all protocols."""

import asyncio
import json
import os
import re
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from bundle_copies import linked_copy
from click import UsageError
from click.testing import CliRunner
from gated_engine import Gate
from http_server import free_port
from in_process_server import status_of
from triton_requests import images_of
from tritonclient.utils import InferenceServerException
from unloadable_server import RunningServer, serving, until

from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.serving.client import AsyncDetectorClient
from maskrcnn_trt.serving.commands.serve import model_sources, serve
from maskrcnn_trt.serving.commands.serve_doctor import diagnose
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.detections import SchedulingOptions
from maskrcnn_trt.serving.engines import worker_process
from maskrcnn_trt.serving.errors import RefusedError, ServingError
from maskrcnn_trt.serving.host import child_process_ids
from maskrcnn_trt.serving.pipeline.served_model import ModelSource
from maskrcnn_trt.serving.server import detection_server

Encode = Callable[..., bytes]


def two_models(bundle: Path, folder: Path) -> list[ModelSource]:
    return [ModelSource(linked_copy(bundle, folder / name), name) for name in ("street", "indoor")]


async def index_of(server: RunningServer) -> dict[str, str]:
    models = (await server.triton.get_model_repository_index()).models
    return {model.name: model.state for model in models if not model.name.endswith("-fp32")}


def fetch(url: str, data: bytes | None = None) -> tuple[int, Any]:
    try:
        with urllib.request.urlopen(url, data) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


async def test_models_are_chosen_by_name(
    wide_bundle: Path, tmp_path: Path, picture: Encode, caplog: pytest.LogCaptureFixture
) -> None:
    image, port = picture(), free_port()
    async with serving(two_models(wide_bundle, tmp_path), caplog, http_port=port) as server:
        assert await index_of(server) == {"street": "READY", "indoor": "READY"}
        detector = server.detector
        for name in ("street", "indoor"):
            assert (await server.triton.get_model_metadata(name)).name == name
            assert await server.triton.is_model_ready(name)
            result = await server.triton.infer(name, images_of(image))
            assert result.as_numpy("num_detections").all()
            assert (await detector.Detect(pb.DetectRequest(image=image, model=name))).detections
            assert (await detector.GetModel(pb.GetModelRequest(model=name))).name == name
        assert (await detector.GetModel(pb.GetModelRequest())).name == "street"
        requests = [pb.DetectRequest(image=image, model=name) for name in ("indoor", "none")]
        found, missing = [own async for own in detector.DetectStream(iter(requests))]
        assert {found.WhichOneof("result"), missing.WhichOneof("result")} == {"response", "error"}
        # Each model counts its own requests.
        success = "nv_inference_request_success"
        for name, count in (("street", 1), ("indoor", 1), ("indoor-fp32", 0)):
            labels = {"model": name, "version": "1"}
            assert await server.metrics.value(success, **labels) >= count
        call = detector.Detect(pb.DetectRequest(image=image, model="none"))
        status, message = await status_of(call)
        assert status is grpc.StatusCode.NOT_FOUND
        assert "street, street-fp32, indoor, indoor-fp32" in message
        with pytest.raises(InferenceServerException, match="street, street-fp32, indoor"):
            await server.triton.load_model("none")
        async with AsyncDetectorClient(server.address) as client:
            assert len(await client.detect(image, scheduling=SchedulingOptions(model="indoor")))
            with pytest.raises(RefusedError, match="indoor"):
                await client.detect(image, scheduling=SchedulingOptions(model="none"))
        url = f"http://127.0.0.1:{port}/v1"
        status, model = await asyncio.to_thread(fetch, f"{url}/model?model=indoor")
        assert (status, model["name"]) == (200, "indoor")
        status, _ = await asyncio.to_thread(fetch, f"{url}/detect?model=indoor", image)
        assert status == 200
        status, error = await asyncio.to_thread(fetch, f"{url}/detect?model=none", image)
        assert status == 404
        assert "indoor" in error["error"]
        assert "request for indoor" in caplog.text
        unknown = [own for own in caplog.messages if "NOT_FOUND" in own]
        assert unknown
        assert all(message.startswith("request for an unknown model") for message in unknown)


async def test_models_have_queues_and_states_of_their_own(
    wide_bundle: Path,
    tmp_path: Path,
    gate: Gate,
    picture: Encode,
    caplog: pytest.LogCaptureFixture,
) -> None:
    image, reload = picture(), asyncio.Event()
    models = two_models(wide_bundle, tmp_path)
    async with serving(models, caplog, reload, queue_size=1) as server:
        number = gate.count
        gate.close()
        detector = server.detector
        full = detector.Detect(pb.DetectRequest(image=image))
        await gate.comes_to(number + 1)
        rejected = detector.Detect(pb.DetectRequest(image=image))
        other = detector.Detect(pb.DetectRequest(image=image, model="indoor"))
        status, _ = await status_of(rejected)
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        await gate.comes_to(number + 2)  # its queue has room
        gate.open()
        assert (await full).detections
        assert (await other).detections

        await server.triton.unload_model("indoor")
        assert await index_of(server) == {"street": "READY", "indoor": "UNAVAILABLE"}
        assert await server.triton.is_server_ready()  # the state of the first model
        with pytest.raises(InferenceServerException, match="'indoor' is unloaded"):
            await server.triton.infer("indoor", images_of(image))
        assert (await detector.Detect(pb.DetectRequest(image=image))).detections
        await server.triton.load_model("indoor")
        await server.triton.unload_model("street")
        assert not await server.triton.is_server_ready()
        await server.triton.load_model("street")
        assert await index_of(server) == {"street": "READY", "indoor": "READY"}

        caplog.clear()
        reload.set()
        await until(
            lambda: all(f"reloaded the bundle of model {own.name}" in caplog.text for own in models)
        )


async def test_reloads_cannot_give_a_model_the_name_of_another(
    wide_bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = linked_copy(wide_bundle, tmp_path / "own")
    manifest = json.loads((own / "manifest.json").read_text())
    (own / "manifest.json").unlink()

    def rename(name: str) -> None:
        (own / "manifest.json").write_text(json.dumps({**manifest, "model_name": name}))

    rename("indoor")
    async with serving([ModelSource(wide_bundle, "street"), ModelSource(own)], caplog) as server:
        rename("street")
        with pytest.raises(InferenceServerException, match="two models have the name 'street'"):
            await server.triton.load_model("indoor")
        assert await index_of(server) == {"street": "READY", "indoor": "READY"}


async def test_a_repository_serves_the_newest_version_of_each_model(
    wide_bundle: Path, tmp_path: Path, picture: Encode, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("street", "indoor"):
        (tmp_path / name).mkdir()
    linked_copy(wide_bundle, tmp_path / "indoor" / "1")
    linked_copy(wide_bundle, tmp_path / "street" / "2")
    models = model_sources([str(tmp_path)], ServeConfig())
    # A specific version.
    models += model_sources([f"old={tmp_path}/street/2"], ServeConfig())
    assert [(own.name, own.resolved().version) for own in models] == [
        ("indoor", "1"),
        ("street", "2"),
        ("old", "2"),
    ]
    async with serving(models[:2], caplog) as server:
        linked_copy(wide_bundle, tmp_path / "street" / "10")
        assert (await server.triton.get_model_metadata("street")).versions == ["2"]
        await server.triton.infer("street", images_of(picture()), "2")
        await server.triton.load_model("street")
        assert (await server.triton.get_model_metadata("street", "10")).versions == ["10"]
        assert await server.triton.is_model_ready("street", "10")
        assert f"reloaded the bundle of model street: {tmp_path}/street/10" in caplog.text
        result = await server.triton.infer("street", images_of(picture()), "10")
        assert result.get_response().model_version == "10"
        await server.triton.infer("street", images_of(picture()), "10")
        for version, requests in (("2", 1), ("10", 2)):
            labels = {"model": "street", "version": version}
            assert await server.metrics.value("nv_inference_request_success", **labels) == requests
        with pytest.raises(InferenceServerException, match=r"version '2' .* use 10"):
            await server.triton.infer("street", images_of(picture()), "2")


async def test_hanging_workers_of_all_models_are_killed_at_the_same_time(
    wide_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_s = 5.0
    monkeypatch.setattr(worker_process, "_CLOSE_TIMEOUT_S", limit_s)
    others = child_process_ids()
    config = ServeConfig(port=0, drain_delay_s=0)
    async with detection_server(two_models(wide_bundle, tmp_path), config):
        workers = child_process_ids() - others
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        begin = time.monotonic()
    assert len(workers) == 2
    assert limit_s <= time.monotonic() - begin < 2 * limit_s


async def test_clashing_names_are_rejected_with_the_remedy(wide_bundle: Path) -> None:
    models = [ModelSource(wide_bundle), ModelSource(wide_bundle)]
    with pytest.raises(ServingError, match=r"two models have the name .*street=BUNDLE"):
        async with detection_server(models, ServeConfig(port=0)):
            pass


def test_invalid_names_of_models_are_rejected(wide_bundle: Path) -> None:
    result = CliRunner().invoke(serve, [f"my street={wide_bundle}", "--doctor"])
    assert result.exit_code == 2
    assert f"street={wide_bundle}" in result.output


def test_versions_of_a_model_need_its_name(wide_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "street").mkdir()
    linked_copy(wide_bundle, tmp_path / "street" / "1")
    with pytest.raises(UsageError, match=f"as in street={tmp_path}/street$"):
        model_sources([str(tmp_path / "street")], ServeConfig())


def test_doctor_adds_up_the_messages_of_all_models(wide_bundle: Path) -> None:
    config = ServeConfig(port=0)
    sources = dict.fromkeys(ServeConfig.model_fields, "the default")
    texts = []
    for number in (1, 2):
        sections = diagnose(number * [ModelSource(wide_bundle)], config, sources)
        limits = next(section for section in sections if section.title == "Limits")
        texts += [result.text for result in limits.results if result.subject == "memory"]
    assert [re.findall(r"[0-9]+(?= x queue_size)", text) for text in texts] == [["4"], ["6"]]
