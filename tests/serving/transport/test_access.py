"""Who gets in: tokens, and calls that change what is served."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from maskrcnn_trt.protos.inference import open_inference_pb2
from maskrcnn_trt.protos.inference.open_inference_pb2_grpc import GRPCInferenceServiceStub
from maskrcnn_trt.protos.maskrcnn.v1 import detector_pb2 as pb
from maskrcnn_trt.protos.maskrcnn.v1.detector_pb2_grpc import DetectorStub
from maskrcnn_trt.serving.config import ServeConfig
from maskrcnn_trt.serving.errors import ForbiddenError, ServingError, UnauthenticatedError
from maskrcnn_trt.serving.server import detection_server
from maskrcnn_trt.serving.transport.access import AccessPolicy

LOAD = "/inference.GRPCInferenceService/RepositoryModelLoad"
DETECT = "/maskrcnn.v1.Detector/Detect"
HERE, ELSEWHERE = "ipv4:127.0.0.1:50000", "ipv4:192.0.2.1:50000"


def bearing(token: str) -> tuple[tuple[str, str]]:
    return (("authorization", f"Bearer {token}"),)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    """Settings of files that hold tokens."""
    users, admins = tmp_path / "tokens", tmp_path / "admin-tokens"
    users.write_text("# those of the factory\nline-1\n\nline-2  # the new one\n")
    admins.write_text("boss==\n")
    return {"token_file": users, "admin_token_file": admins}


def policy(**settings: Any) -> AccessPolicy:
    return AccessPolicy(ServeConfig(**settings))


def outcome(policy: AccessPolicy, method: str, token: str = "", peer: str = ELSEWHERE) -> str:
    try:
        policy.check(method, bearing(token) if token else (), peer)
    except UnauthenticatedError:
        return "who?"
    except ForbiddenError:
        return "no"
    return "yes"


@pytest.mark.parametrize(
    ("names", "method", "expected"),
    [
        # By: nobody, a stranger's token, a user's, an admin's.
        ([], DETECT, "yes yes yes yes"),
        (["token_file"], DETECT, "who? who? yes who?"),
        (["admin_token_file"], DETECT, "yes yes yes yes"),
        (["token_file", "admin_token_file"], DETECT, "who? who? yes yes"),
        ([], LOAD, "no no no no"),
        (["token_file"], LOAD, "no no no no"),
        (["admin_token_file"], LOAD, "who? who? who? yes"),
        (["token_file", "admin_token_file"], LOAD, "who? who? no yes"),
    ],
)
def test_who_may_do_what(
    files: dict[str, Path], names: list[str], method: str, expected: str
) -> None:
    access = policy(**{name: files[name] for name in names})
    tokens = "", "stranger", "line-2", "boss=="
    assert [outcome(access, method, token) for token in tokens] == expected.split()


def test_without_tokens_this_machine_may_load_models(files: dict[str, Path]) -> None:
    for peer in (HERE, "ipv6:[::1]:50000", "ipv6:%5B::1%5D:50000", "ipv4:127.8.8.8:1"):
        assert outcome(policy(), LOAD, peer=peer) == "yes"
        assert outcome(policy(token_file=files["token_file"]), LOAD, peer=peer) == "no"
        assert outcome(policy(local_admin=False), LOAD, peer=peer) == "no"
    for peer in (ELSEWHERE, "ipv6:[2001:db8::1]:1", "ipv6:[::2]:1", "", "unknown", "127.0.0.1"):
        assert outcome(policy(), LOAD, peer=peer) == "no"


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
def test_what_is_no_token_lets_nobody_in(files: dict[str, Path], metadata: Any) -> None:
    with pytest.raises(UnauthenticatedError, match="authorization: Bearer TOKEN"):
        policy(token_file=files["token_file"]).check(DETECT, metadata, HERE)


def test_tokens_are_read_anew(files: dict[str, Path], caplog: pytest.LogCaptureFixture) -> None:
    path = files["token_file"]
    access = policy(token_file=path)
    replacement = path.with_name("new")
    replacement.write_text("line-3\n")
    replacement.replace(path)
    assert [outcome(access, DETECT, token) for token in ("line-1", "line-3")] == ["who?", "yes"]
    for damage in ("", "line 4 \N{SNOWMAN}\n"):
        path.write_text(damage)
        assert outcome(access, DETECT, "line-3") == "yes"
    path.unlink()
    assert outcome(access, DETECT, "line-3") == "yes"
    assert sum("stays in force" in record.message for record in caplog.records) == 3
    path.write_text("line-5\n")
    assert [outcome(access, DETECT, token) for token in ("line-3", "line-5")] == ["who?", "yes"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "tokens cannot be read: .*No such file"),
        (b"", "tokens holds no token; write one a line"),
        (b"# none\n \n", "holds no token"),
        (b"good\nnot so good\n", "line 2 of .*tokens is no token"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_faults_of_token_files_are_named(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "tokens"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ServingError, match=message) as caught:
        policy(token_file=path)
    assert "good" not in str(caught.value).replace(str(path), "")


def test_tokens_in_the_open_are_warned_of(
    files: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    for host in ("127.0.0.1", "[::1]", "localhost"):
        policy(host=host, **files)
    policy(host="0.0.0.0")
    assert not caplog.records
    policy(host="0.0.0.0", **files)
    assert "tokens travel unencrypted" in caplog.text


@contextlib.asynccontextmanager
async def connected(bundle: Path, **settings: Any) -> AsyncIterator[grpc.aio.Channel]:
    async with (
        detection_server(bundle, ServeConfig(port=0, drain_delay_s=0, **settings)) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield channel


async def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details() or ""


def test_server_asks_for_tokens_in_calls_of_each_kind(
    bundle: Path, files: dict[str, Path], picture: Callable[..., bytes]
) -> None:
    request = pb.DetectRequest(image=picture())

    async def ask() -> None:
        async with connected(bundle, **files) as channel:
            detector: Any = DetectorStub(channel)
            inference: Any = GRPCInferenceServiceStub(channel)
            name = (await detector.GetModel(pb.GetModelRequest(), metadata=bearing("line-1"))).name
            load = open_inference_pb2.RepositoryModelLoadRequest(model_name=name)
            unload = open_inference_pb2.RepositoryModelUnloadRequest(model_name=name)
            for call in (
                detector.Detect(request),
                detector.Detect(request, metadata=bearing("stranger")),
                detector.DetectStream(iter([request])),
                inference.ModelInfer(open_inference_pb2.ModelInferRequest(model_name=name)),
                inference.ModelStreamInfer(iter([])),
                inference.RepositoryModelLoad(load),
                inference.RepositoryModelUnload(unload),
            ):
                status, message = await status_of(call)
                assert status is grpc.StatusCode.UNAUTHENTICATED
                assert "authorization: Bearer TOKEN" in message
            for call in (
                inference.RepositoryModelLoad(load, metadata=bearing("line-1")),
                inference.RepositoryModelUnload(unload, metadata=bearing("line-1")),
            ):
                status, message = await status_of(call)
                assert status is grpc.StatusCode.PERMISSION_DENIED
                assert "admin_token_file" in message
            for token in ("line-2", "boss=="):
                assert (await detector.Detect(request, metadata=bearing(token))).detections
            answers = detector.DetectStream(iter([request, request]), metadata=bearing("line-1"))
            assert len([answer.response async for answer in answers]) == 2
            await inference.RepositoryModelUnload(unload, metadata=bearing("boss=="))
            await inference.RepositoryModelLoad(load, metadata=bearing("boss=="))

    asyncio.run(ask())


def test_strangers_end_no_stream_of_those_who_have_a_token(
    bundle: Path, files: dict[str, Path], picture: Callable[..., bytes]
) -> None:
    request = pb.DetectRequest(image=picture())
    own = [("grpc.use_local_subchannel_pool", 1)]

    async def ask() -> None:
        config = ServeConfig(port=0, drain_delay_s=0, stop_grace_s=0, queue_size=2, **files)
        async with (
            detection_server(bundle, config) as address,
            grpc.aio.insecure_channel(address) as channel,
            contextlib.AsyncExitStack() as strangers,
        ):
            user: Any = DetectorStub(channel)
            stream = user.DetectStream(metadata=bearing("line-1"))
            await stream.write(request)
            assert (await stream.read()).response.detections
            for _ in range(12):  # three times as many as are waited for
                other = await strangers.enter_async_context(
                    grpc.aio.insecure_channel(address, options=own)
                )
                silent = ServerReflectionStub(other).ServerReflectionInfo()
                await silent.write(ServerReflectionRequest(list_services=""))
                assert (await silent.read()).list_services_response.service
            await stream.write(request)
            assert (await stream.read()).response.detections

    asyncio.run(ask())


def test_calls_that_anyone_may_make_are_few_of_a_connection(bundle: Path) -> None:
    async def ask() -> None:
        async with connected(bundle, stop_grace_s=0) as channel:
            health: Any = HealthStub(channel)
            watches = [health.Watch(HealthCheckRequest()) for _ in range(8)]
            for watch in watches:
                assert (await watch.read()).status
            status, message = await status_of(health.Check(HealthCheckRequest()))
            assert status is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "has 8 calls for health and reflection open" in message
            watches[0].cancel()
            async with asyncio.timeout(60):
                while (await health.Check(HealthCheckRequest()).code()) != grpc.StatusCode.OK:
                    await asyncio.sleep(0.02)

    asyncio.run(ask())


def test_health_and_reflection_are_for_everyone(bundle: Path, files: dict[str, Path]) -> None:
    async def ask() -> None:
        async with connected(bundle, **files) as channel:
            health, inference = HealthStub(channel), GRPCInferenceServiceStub(channel)
            assert (await health.Check(HealthCheckRequest())).status
            assert (await health.Watch(HealthCheckRequest()).read()).status
            assert (await inference.ServerLive(open_inference_pb2.ServerLiveRequest())).live
            assert (await inference.ServerReady(open_inference_pb2.ServerReadyRequest())).ready
            assert await inference.ModelReady(open_inference_pb2.ModelReadyRequest(name="x"))
            reflection = ServerReflectionStub(channel)
            asked = iter([ServerReflectionRequest(list_services="")])
            answers = [a async for a in reflection.ServerReflectionInfo(asked)]
            assert answers[0].list_services_response.service

    asyncio.run(ask())


def test_file_that_cannot_be_opened_keeps_the_server_from_starting(
    bundle: Path, tmp_path: Path
) -> None:
    async def start() -> None:
        async with connected(bundle, token_file=tmp_path / "missing"):
            pass

    with pytest.raises(ServingError, match=r"missing cannot be read"):
        asyncio.run(start())
