"""Output files of runs that end early or cannot be written."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run_main
from PIL import Image
from server_load import wait_until

from maskrcnn_trt.model.image_limits import ImageError
from maskrcnn_trt.serving.client import DetectorClient
from maskrcnn_trt.serving.commands.reports import write_report
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import UnreachableError

Encode = Callable[..., bytes]


@pytest.fixture
def interrupts_enabled() -> Iterator[None]:
    """Let subprocesses receive signals that a background job of a shell or `nohup` ignores."""
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    hang_up = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGHUP, hang_up)


def images_of(results: Path) -> set[int]:
    """Return the IDs of the images in a results file, read by pycocotools."""
    coco = pytest.importorskip("pycocotools.coco")
    truth = coco.COCO()
    truth.dataset = {
        "images": [{"id": index, "height": 120, "width": 200} for index in range(30)],
        "categories": [{"id": index} for index in (3, 7, 8)],
        "annotations": [],
    }
    truth.createIndex()
    loaded = truth.loadRes(str(results))
    annotations = loaded.loadAnns(loaded.getAnnIds())
    assert all(loaded.annToMask(annotation).shape == (120, 200) for annotation in annotations)
    return {annotation["image_id"] for annotation in annotations}


def pictures(folder: Path, picture: Encode, count: int) -> list[Path]:
    paths = [folder / f"{index}.jpg" for index in range(count)]
    for index, path in enumerate(paths):
        path.write_bytes(picture(index))
    return paths


# `maskrcnn` that reads images from pipes too, so that it can be made to wait.
_PROGRAM = "import stat; stat.S_ISREG = bool; from maskrcnn_trt.cli import main; main()"


def command(*words: object, before: str = "") -> list[str]:
    """Return a command line of `maskrcnn` after a shell command."""
    line = [sys.executable, "-c", _PROGRAM, *map(str, words), "--score-threshold", "0.2"]
    return ["bash", "-c", f'{before}\nexec "$@"', "bash", *line]


@contextlib.contextmanager
def stuck_run(
    fifo: Path, *words: object, before: str = ""
) -> Iterator[tuple["subprocess.Popen[str]", Any]]:
    """Start a process that blocks on reading an image, and yield it with the pipe it reads."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    os.mkfifo(fifo)
    line = command(*words, before=before)
    with subprocess.Popen(line, **pipes) as process, fifo.open("wb") as end:
        # Python may miss a signal that arrives just before it begins to read.
        wait_until(lambda: _is_reading_pipe(process.pid))
        yield process, end


def _is_reading_pipe(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return any("pipe_read" in (thread / "wchan").read_text() for thread in threads)


@pytest.mark.usefixtures("interrupts_enabled")
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_leaves_the_results_so_far(
    address: str, picture: Encode, tmp_path: Path, number: int, status: int
) -> None:
    paths = pictures(tmp_path, picture, 3)
    fifo, output = tmp_path / "3.jpg", tmp_path / "output"
    words = ["client", address, *paths, fifo, "-o", output, "--concurrency", 1]
    with stuck_run(fifo, *words) as (process, _):
        process.send_signal(number)
        while number != signal.SIGINT and process.poll() is None:
            process.send_signal(number)  # `timeout` sends it twice
            time.sleep(0.001)
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == status
    assert f"in 3 images, see {output}" in stdout
    assert "after 3 of 4 images" in stderr
    assert "Traceback" not in stderr
    assert images_of(output / "detections.json") == {0, 1, 2}
    assert {path.stem for path in output.iterdir()} == {"0", "1", "2", "detections"}


@pytest.mark.usefixtures("interrupts_enabled")
def test_signal_to_predict_leaves_the_results_so_far(
    bundle: Path, picture: Encode, tmp_path: Path
) -> None:
    paths = pictures(tmp_path, picture, 20)  # more than the read-ahead
    fifo, output = tmp_path / "20.jpg", tmp_path / "output"
    with stuck_run(fifo, "predict", bundle, *paths, fifo, "-o", output) as (process, _):
        process.send_signal(signal.SIGHUP)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 129
    assert "Traceback" not in stderr
    images = images_of(output / "detections.json")
    assert images == set(range(len(images))) != set()


def test_ignored_sighup_stays_ignored(address: str, picture: Encode, tmp_path: Path) -> None:
    paths = pictures(tmp_path, picture, 2)
    fifo, output = tmp_path / "2.jpg", tmp_path / "output"
    words = ["client", address, *paths, fifo, "-o", output, "--format", "coco"]
    with stuck_run(fifo, *words, before="trap '' HUP") as (process, end):
        process.send_signal(signal.SIGHUP)
        end.write(picture(2))
        end.close()
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert images_of(output / "detections.json") == {0, 1, 2}


@pytest.mark.parametrize(
    ("output_format", "limit_kb", "lost", "left"),
    [
        ("pictures", 20, "0.png", {"detections.json"}),
        ("numpy", 0, "detections.json", set()),
        ("coco", 0, "detections.json", set()),
    ],
)
def test_full_disk_is_reported(
    bundle: Path,
    address: str,
    picture: Encode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    output_format: str,
    limit_kb: int,
    lost: str,
    left: set[str],
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (120, 200, 3), np.uint8)
    paths = [str(tmp_path / "0.jpg"), str(tmp_path / "1.jpg")]
    for path in paths:
        Image.fromarray(noise).save(path)  # its PNG is larger than its results
    # The limit also applies to the memory that this process shares with the server's worker. A run
    # without a limit lets this memory grow first: for each batch in flight, and for batches of at
    # least two images.
    (tmp_path / "more").mkdir()
    more = map(str, pictures(tmp_path / "more", picture, 16))
    run_main(monkeypatch, capsys, "client", address, *more, "-o", str(tmp_path / "grown"))
    for verb, source in (("client", address), ("predict", str(bundle))):
        output = tmp_path / verb
        words = [verb, source, *paths, "-o", str(output), "--score-threshold", "0.2"]
        words += ["--format", "coco", "--format", output_format]
        with full_disk(limit_kb << 10):
            code, _, stderr = run_main(monkeypatch, capsys, *words)
        assert code == 1
        error = stderr.splitlines()[-1]
        assert error.startswith(f"Error: {output / lost}: File too large")
        assert "--output" in error
        assert {path.name for path in output.iterdir()} == left
        if left:
            assert images_of(output / "detections.json") == {0}


@contextlib.contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Let this process write at most `limit` bytes to a file."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_stdout_on_a_full_disk_is_reported(address: str, picture: Encode, tmp_path: Path) -> None:
    paths = pictures(tmp_path, picture, 1)
    with open("/dev/full", "w") as full:
        line = command("client", address, *paths, "-o", tmp_path / "output")
        result = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("Error: No space left on device")
    assert "Traceback" not in result.stderr
    assert images_of(tmp_path / "output" / "detections.json") == {0}


def test_run_without_results_keeps_earlier_ones(
    picture: Encode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = pictures(tmp_path, picture, 2)
    results = tmp_path / "output" / "detections.json"
    results.parent.mkdir()
    results.write_text("earlier results")
    with (
        DetectorClient("localhost:1", retries=0) as client,
        pytest.raises(UnreachableError),
    ):
        write_report(paths, client.detect_many(paths, concurrency=2), results.parent)
    assert [path.name for path in results.parent.iterdir()] == ["detections.json"]
    assert results.read_text() == "earlier results"
    assert capsys.readouterr().out == ""


def test_lost_server_leaves_the_results_so_far(
    address: str, picture: Encode, tmp_path: Path
) -> None:
    paths = pictures(tmp_path, picture, 4)
    lost = UnreachableError("lost")

    def outcomes(client: DetectorClient) -> Iterator[Any]:
        yield from client.detect_many(paths[:2])
        yield lost
        raise lost

    output = tmp_path / "output"
    output.mkdir()
    (output / "detections.json").write_text("earlier results")
    with DetectorClient(address) as client, pytest.raises(UnreachableError):
        write_report(paths, outcomes(client), output, ("coco",))
    assert images_of(output / "detections.json") == {0, 1}
    assert [path.name for path in output.iterdir()] == ["detections.json"]


def test_failed_write_keeps_earlier_results(address: str, picture: Encode, tmp_path: Path) -> None:
    paths = pictures(tmp_path, picture, 1)
    results = tmp_path / "detections.json"
    results.write_text("earlier results")
    with (
        full_disk(0),
        DetectorClient(address) as client,
        pytest.raises(OSError, match=str(results)),
    ):
        write_report(paths, client.detect_many(paths), tmp_path, ("coco",))
    assert results.read_text() == "earlier results"
    assert {path.name for path in tmp_path.iterdir()} == {"0.jpg", "detections.json"}


def test_deleted_image_does_not_affect_the_others(
    address: str, picture: Encode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = pictures(tmp_path, picture, 3)

    def outcomes(client: DetectorClient) -> Iterator[Any]:
        for path, outcome in zip(paths, client.detect_many(paths), strict=True):
            assert isinstance(outcome, Detections)
            if path == paths[1]:
                path.unlink()
            yield outcome

    output = tmp_path / "output"
    with DetectorClient(address) as client, pytest.raises(Exception, match="1 of 3 images failed"):
        write_report(paths, outcomes(client), output)
    stderr = capsys.readouterr().err
    assert "1.jpg: " in stderr
    assert "No such file" in stderr
    assert {record["image_id"] for record in json.loads((output / "detections.json").read_text())}
    assert (output / "2.png").exists()


def test_messages_are_printed_without_markup(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [Path(name) for name in (":cat:.jpg", "[bold]street[/bold].jpg", "c.jpg")]
    reasons = [ImageError("sent to localhost:abc"), ImageError("[red]"), ImageError("")]
    with pytest.raises(Exception, match="3 of 3 images failed"):
        write_report(paths, reasons, tmp_path)
    stderr = capsys.readouterr().err
    assert ":cat:.jpg: sent to localhost:abc" in stderr
    assert "[bold]street[/bold].jpg: [red]" in stderr
