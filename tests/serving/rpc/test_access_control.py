"""Authorization by bearer tokens, and rights to load and unload models."""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub
from in_process_server import connected, served, served_in_thread, status_of

from maskrcnn_trt.protos.inference import open_inference_pb2
from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.errors import ForbiddenError, ServingError, UnauthenticatedError
from maskrcnn_trt.serving.rpc.access_control import AccessPolicy

LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"
DETECT = "/maskrcnn.v1.Detector/Detect"
LOCAL, REMOTE = "ipv4:127.0.0.1:50000", "ipv4:192.0.2.1:50000"
UNKNOWN = "unauthenticated"
ALL, NONE = 4 * ["allowed"], 4 * ["forbidden"]


def bearer(token: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {token}"),)


def write_tokens(folder: Path) -> dict[str, Path]:
    """Write token files. Return the settings that name them."""
    users, admins = folder / "tokens", folder / "admin-tokens"
    users.write_text("# factory\nline-1\n\nline-2  # new\n")
    admins.write_text("boss==\n")
    return {"token_file": users, "admin_token_file": admins}


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    return write_tokens(tmp_path)


def policy(**settings: Any) -> AccessPolicy:
    return AccessPolicy(ServeConfig(**settings))


def outcome(policy: AccessPolicy, method: str, token: str = "", peer: str = REMOTE) -> str:
    try:
        policy.check(method, bearer(token) if token else (), peer)
    except UnauthenticatedError:
        return "unauthenticated"
    except ForbiddenError:
        return "forbidden"
    return "allowed"


@pytest.mark.parametrize(
    ("names", "method", "expected"),
    [
        # Outcome without a token, and with an unknown, a user's and an admin's token.
        ([], DETECT, ALL),
        (["token_file"], DETECT, [UNKNOWN, UNKNOWN, "allowed", UNKNOWN]),
        (["admin_token_file"], DETECT, ALL),
        (["token_file", "admin_token_file"], DETECT, [UNKNOWN, UNKNOWN, "allowed", "allowed"]),
        ([], LOAD, NONE),
        (["token_file"], LOAD, NONE),
        (["admin_token_file"], LOAD, [UNKNOWN, UNKNOWN, UNKNOWN, "allowed"]),
        (["token_file", "admin_token_file"], LOAD, [UNKNOWN, UNKNOWN, "forbidden", "allowed"]),
    ],
)
def test_access_depends_on_method_and_token(
    files: dict[str, Path], names: list[str], method: str, expected: list[str]
) -> None:
    access = policy(**{name: files[name] for name in names})
    tokens = "", "unknown", "line-2", "boss=="
    assert [outcome(access, method, token) for token in tokens] == expected


def test_without_tokens_loopback_clients_may_load_models(files: dict[str, Path]) -> None:
    for peer in (LOCAL, "ipv6:[::1]:50000", "ipv6:%5B::1%5D:50000", "ipv4:127.8.8.8:1"):
        assert outcome(policy(), LOAD, peer=peer) == "allowed"
        assert outcome(policy(token_file=files["token_file"]), LOAD, peer=peer) == "forbidden"
        assert outcome(policy(local_admin=False), LOAD, peer=peer) == "forbidden"
    for peer in (REMOTE, "ipv6:[2001:db8::1]:1", "ipv6:[::2]:1", "", "unknown", "127.0.0.1"):
        assert outcome(policy(), LOAD, peer=peer) == "forbidden"


@pytest.mark.parametrize(
    "metadata",
    [
        [("authorization", "Basic line-1")],
        [("authorization", "line-1")],
        [("authorization", "Bearer")],
        [("authorization", "Bearer line-1 line-2")],
        [("authorization", "Bearer LINE-1")],
        [("authorization", b"Bearer line-1")],
        [("Token", "line-1")],
    ],
)
def test_malformed_authorization_is_rejected(files: dict[str, Path], metadata: Any) -> None:
    with pytest.raises(UnauthenticatedError, match="authorization: Bearer TOKEN"):
        policy(token_file=files["token_file"]).check(DETECT, metadata, LOCAL)


def test_changed_token_files_are_reloaded(
    files: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = files["token_file"]
    access = policy(token_file=path)
    replacement = path.with_name("new")
    replacement.write_text("line-3\n")
    replacement.replace(path)
    assert outcome(access, DETECT, "line-1") == UNKNOWN
    assert outcome(access, DETECT, "line-3") == "allowed"
    path.write_text("line 4 \N{SNOWMAN}\n")
    assert outcome(access, DETECT, "line-3") == "allowed"
    assert "stays in use" in caplog.text
    path.write_text("line-5\n")
    assert outcome(access, DETECT, "line-3") == UNKNOWN
    assert outcome(access, DETECT, "line-5") == "allowed"


@pytest.mark.parametrize("content", ["", "# line-1\n", None])
def test_without_content_no_token_is_valid(
    files: dict[str, Path], content: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    path = files["token_file"]
    access = policy(token_file=path)
    if content is None:
        path.unlink()
    else:
        path.write_text(content)
    assert outcome(access, DETECT, "line-1") == UNKNOWN
    assert outcome(access, DETECT, "") == UNKNOWN
    assert (
        sum(str(path) in record.message for record in caplog.records if record.levelname == "ERROR")
        == 1
    )
    path.write_text("line-5\n")
    assert outcome(access, DETECT, "line-5") == "allowed"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "tokens: .*No such file"),
        (b"", "tokens contains no tokens; write one per line"),
        (b"# none\n \n", "contains no tokens"),
        (b"good\nnot so good\n", "line 2 of .*tokens"),
        (b"\xff\xfe", "cannot read .*tokens"),
    ],
)
def test_invalid_token_files_raise(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "tokens"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ServingError, match=message) as caught:
        policy(token_file=path)
    assert "good" not in str(caught.value).replace(str(path), "")


def test_unencrypted_tokens_log_a_warning(
    files: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    for host in ("127.0.0.1", "[::1]", "localhost"):
        policy(host=host, **files)
    policy(host="0.0.0.0")
    assert not caplog.records
    policy(host="0.0.0.0", **files)
    assert "0.0.0.0 unencrypted" in caplog.text


@pytest.fixture(scope="module")
def address(wide_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a server with two slots and both token files."""
    files = write_tokens(tmp_path_factory.mktemp("tokens"))
    with served_in_thread(wide_bundle, queue_size=2, **files) as address:
        yield address


async def test_calls_of_each_kind_need_a_token(address: str, picture: Callable[..., bytes]) -> None:
    request = pb.DetectRequest(image=picture())
    async with connected(address, lambda channel: channel) as channel:
        detector: Any = DetectorStub(channel)
        inference: Any = GRPCInferenceServiceStub(channel)
        name = (await detector.GetModel(pb.GetModelRequest(), metadata=bearer("line-1"))).name
        load = open_inference_pb2.RepositoryModelLoadRequest(model_name=name)
        unload = open_inference_pb2.RepositoryModelUnloadRequest(model_name=name)
        for call in (
            detector.Detect(request),
            detector.Detect(request, metadata=bearer("unknown")),
            # Without a request: gRPC can replace the status of a rejected call by INTERNAL when it
            # writes to that call (https://github.com/grpc/grpc/issues/36066).
            detector.DetectStream(),
            inference.ModelInfer(open_inference_pb2.ModelInferRequest(model_name=name)),
            inference.ModelStreamInfer(),
            inference.RepositoryModelLoad(load),
            inference.RepositoryModelUnload(unload),
        ):
            status, message = await status_of(call)
            assert status is grpc.StatusCode.UNAUTHENTICATED
            assert "authorization: Bearer TOKEN" in message
        for call in (
            inference.RepositoryModelLoad(load, metadata=bearer("line-1")),
            inference.RepositoryModelUnload(unload, metadata=bearer("line-1")),
        ):
            status, message = await status_of(call)
            assert status is grpc.StatusCode.PERMISSION_DENIED
            assert "admin_token_file" in message
        for token in ("line-2", "boss=="):
            assert (await detector.Detect(request, metadata=bearer(token))).detections
        responses = detector.DetectStream(iter([request] * 2), metadata=bearer("line-1"))
        assert len([item.response async for item in responses]) == 2
        await inference.RepositoryModelUnload(unload, metadata=bearer("boss=="))
        await inference.RepositoryModelLoad(load, metadata=bearer("boss=="))


async def test_public_calls_do_not_displace_streams_with_a_token(
    address: str, picture: Callable[..., bytes]
) -> None:
    request = pb.DetectRequest(image=picture())
    async with connected(address) as user, contextlib.AsyncExitStack() as public_clients:
        stream = user.DetectStream(metadata=bearer("line-1"))
        await stream.write(request)
        assert (await stream.read()).response.detections
        for _ in range(12):  # three times the limit
            other = connected(address, ServerReflectionStub)
            silent = (await public_clients.enter_async_context(other)).ServerReflectionInfo()
            await silent.write(ServerReflectionRequest(list_services=""))
            assert (await silent.read()).list_services_response.service
        await stream.write(request)
        assert (await stream.read()).response.detections


async def test_public_calls_need_no_token_and_are_limited_per_connection(address: str) -> None:
    async with connected(address, lambda channel: channel) as channel:
        health: Any = HealthStub(channel)
        inference: Any = GRPCInferenceServiceStub(channel)
        assert (await health.Check(HealthCheckRequest())).status
        assert (await inference.ServerLive(open_inference_pb2.ServerLiveRequest())).live
        assert (await inference.ServerReady(open_inference_pb2.ServerReadyRequest())).ready
        assert await inference.ModelReady(open_inference_pb2.ModelReadyRequest(name="x"))
        requests = iter([ServerReflectionRequest(list_services="")])
        reflected = ServerReflectionStub(channel).ServerReflectionInfo(requests)
        (response,) = [response async for response in reflected]
        assert response.list_services_response.service
        watches = []
        # One after the other, since this server waits for few requests to arrive at a time.
        for _ in range(8):
            watches.append(health.Watch(HealthCheckRequest()))
            assert (await watches[-1].read()).status
        status, message = await status_of(health.Check(HealthCheckRequest()))
        assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "8 open calls for health and reflection" in message
        watches[0].cancel()
        async with asyncio.timeout(60):
            while (await health.Check(HealthCheckRequest()).code()) != grpc.StatusCode.OK:
                await asyncio.sleep(0.02)


async def test_server_does_not_start_with_an_unreadable_token_file(
    wide_bundle: Path, tmp_path: Path
) -> None:
    with pytest.raises(ServingError, match=r"cannot read .*missing"):
        async with served(wide_bundle, token_file=tmp_path / "missing"):
            pass
