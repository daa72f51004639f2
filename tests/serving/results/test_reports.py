"""What a run leaves behind that is ended before its last image."""

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
from PIL import Image
from server_load import wait_until

from maskrcnn_trt.model.images import ImageError
from maskrcnn_trt.serving.client import DetectorClient
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import UnreachableError
from maskrcnn_trt.serving.results.reports import write_report

Encode = Callable[..., bytes]

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture
def heeded_interrupts() -> Iterator[None]:
    """Processes heed SIGINT even if these tests are a shell's background job, which ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def images_of(results: Path) -> set[int]:
    """The ids of the images that pycocotools finds detections of."""
    coco = pytest.importorskip("pycocotools.coco")
    truth = coco.COCO()
    truth.dataset = {
        "images": [{"id": index, "height": 120, "width": 200} for index in range(30)],
        "categories": [{"id": index} for index in (3, 7, 8)],
        "annotations": [],
    }
    truth.createIndex()
    found = truth.loadRes(str(results))
    annotations = found.loadAnns(found.getAnnIds())
    assert all(found.annToMask(annotation).shape == (120, 200) for annotation in annotations)
    return {annotation["image_id"] for annotation in annotations}


def pictures(folder: Path, picture: Encode, count: int) -> list[Path]:
    paths = [folder / f"{index}.jpg" for index in range(count)]
    for index, path in enumerate(paths):
        path.write_bytes(picture(index))
    return paths


def command(*words: object, before: str = "") -> list[str]:
    """A command line of `maskrcnn`, behind what a shell does before it."""
    line = [sys.executable, "-m", "maskrcnn_trt", *map(str, words), "--score-threshold", "0.2"]
    return ["bash", "-c", f'{before}\nexec "$@"', "bash", *line]


@contextlib.contextmanager
def stuck_run(
    fifo: Path, *words: object, before: str = ""
) -> Iterator[tuple["subprocess.Popen[str]", Any]]:
    """A process that has come to an image which never comes, and what would end that image."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    os.mkfifo(fifo)
    line = command(*words, before=before)
    with subprocess.Popen(line, **pipes) as process, fifo.open("wb") as end:
        # Python may sleep through a signal that comes at the moment at which it begins to read.
        wait_until(lambda: _is_reading_pipe(process.pid))
        yield process, end


def _is_reading_pipe(pid: int) -> bool:
    threads = Path(f"/proc/{pid}/task").iterdir()
    return any("pipe_read" in (thread / "wchan").read_text() for thread in threads)


@pytest.mark.usefixtures("heeded_interrupts")
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_ended_run_leaves_the_results_so_far(
    address: str, picture: Encode, tmp_path: Path, number: int, status: int
) -> None:
    paths = pictures(tmp_path, picture, 3)
    fifo, output = tmp_path / "3.jpg", tmp_path / "found"
    words = ["client", address, *paths, fifo, "-o", output, "--concurrency", 1]
    with stuck_run(fifo, *words) as (process, _):
        process.send_signal(number)
        while number != signal.SIGINT and process.poll() is None:
            process.send_signal(number)  # `timeout` does it twice
            time.sleep(0.001)
        said, complaint = process.communicate(timeout=60)
    assert process.returncode == status
    assert "detections in 3 images, see" in said
    assert "Traceback" not in complaint
    assert images_of(output / "detections.json") == {0, 1, 2}
    assert {path.name for path in output.iterdir()} == {
        "0.png",
        "1.png",
        "2.png",
        "detections.json",
    }


def test_ended_prediction_leaves_the_results_so_far(
    bundle: Path, picture: Encode, tmp_path: Path
) -> None:
    paths = pictures(tmp_path, picture, 20)  # more than are read ahead
    fifo, output = tmp_path / "20.jpg", tmp_path / "found"
    with stuck_run(fifo, "predict", bundle, *paths, fifo, "-o", output) as (process, _):
        process.send_signal(signal.SIGTERM)
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "Traceback" not in complaint
    found = images_of(output / "detections.json")
    assert found == set(range(len(found))) != set()


def test_ignored_hangup_stays_ignored(address: str, picture: Encode, tmp_path: Path) -> None:
    paths = pictures(tmp_path, picture, 2)
    fifo, output = tmp_path / "2.jpg", tmp_path / "found"
    words = ["client", address, *paths, fifo, "-o", output, "--format", "coco"]
    with stuck_run(fifo, *words, before="trap '' HUP") as (process, end):
        process.send_signal(signal.SIGHUP)
        end.write(picture(2))
        end.close()
        _, complaint = process.communicate(timeout=60)
    assert process.returncode == 0, complaint
    assert images_of(output / "detections.json") == {0, 1, 2}


@pytest.mark.parametrize(
    ("output_format", "limit_kb", "lost", "left"),
    [
        ("pictures", 40, "0.png", {"detections.json"}),
        ("numpy", 0, "detections.json", set()),
        ("coco", 0, "detections.json", set()),
    ],
)
def test_full_disk_is_told_in_a_sentence(
    bundle: Path,
    address: str,
    tmp_path: Path,
    output_format: str,
    limit_kb: int,
    lost: str,
    left: set[str],
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (120, 200, 3), np.uint8)
    paths = [tmp_path / "0.jpg", tmp_path / "1.jpg"]
    for path in paths:
        Image.fromarray(noise).save(path)  # a PNG of which is larger than what is found in it
    for verb, source in (("client", address), ("predict", bundle)):
        output = tmp_path / verb
        words = [verb, source, *paths, "-o", output, "--format", "coco", "--format", output_format]
        line = command(*words, before=f"ulimit -f {limit_kb}")
        result = subprocess.run(line, capture_output=True, text=True, timeout=60)
        assert result.returncode == 1
        remedy = "make room or choose another folder with --output"
        sentence = f"Error: {output / lost}: File too large; {remedy}\n"
        assert result.stderr.endswith(sentence)
        assert "Traceback" not in result.stderr
        assert {path.name for path in output.iterdir()} == left
        if left:
            assert images_of(output / "detections.json") == {0}


def test_output_to_a_full_disk_is_told_in_a_sentence(
    address: str, picture: Encode, tmp_path: Path
) -> None:
    paths = pictures(tmp_path, picture, 1)
    with open("/dev/full", "w") as full:
        line = command("client", address, *paths, "-o", tmp_path / "found")
        result = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("Error: No space left on device")
    assert "Traceback" not in result.stderr
    assert images_of(tmp_path / "found" / "detections.json") == {0}


def test_run_without_an_answer_leaves_what_was_there(
    picture: Encode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = pictures(tmp_path, picture, 2)
    results = tmp_path / "found" / "detections.json"
    results.parent.mkdir()
    results.write_text("what an earlier run has found")
    with (
        DetectorClient("localhost:1", retries=0) as client,
        pytest.raises(UnreachableError),
    ):
        write_report(paths, client.detect_many(paths, concurrency=2), results.parent)
    assert [path.name for path in results.parent.iterdir()] == ["detections.json"]
    assert results.read_text() == "what an earlier run has found"
    assert capsys.readouterr().out == ""


def test_run_that_loses_its_server_leaves_the_results_so_far(
    address: str, picture: Encode, tmp_path: Path
) -> None:
    paths = pictures(tmp_path, picture, 4)
    lost = UnreachableError("it went")

    def outcomes(client: DetectorClient) -> Iterator[Any]:
        yield from client.detect_many(paths[:2])
        yield lost
        raise lost

    output = tmp_path / "found"
    output.mkdir()
    (output / "detections.json").write_text("what an earlier run has found")
    with DetectorClient(address) as client, pytest.raises(UnreachableError):
        write_report(paths, outcomes(client), output, ("coco",))
    assert images_of(output / "detections.json") == {0, 1}
    assert [path.name for path in output.iterdir()] == ["detections.json"]


def test_results_that_cannot_be_written_leave_those_that_were(
    address: str, picture: Encode, tmp_path: Path
) -> None:
    paths = pictures(tmp_path, picture, 1)
    results = tmp_path / "detections.json"
    results.write_text("what an earlier run has found")
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, usual[1]))  # as if the disk were full
    try:
        with DetectorClient(address) as client, pytest.raises(OSError, match=str(results)):
            write_report(paths, client.detect_many(paths), tmp_path, ("coco",))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert results.read_text() == "what an earlier run has found"
    assert {path.name for path in tmp_path.iterdir()} == {"0.jpg", "detections.json"}


def test_picture_that_goes_while_it_is_looked_at_fails_alone(
    address: str, picture: Encode, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = pictures(tmp_path, picture, 3)

    def outcomes(client: DetectorClient) -> Iterator[Any]:
        for path, outcome in zip(paths, client.detect_many(paths), strict=True):
            assert isinstance(outcome, Detections)
            if path == paths[1]:
                path.unlink()
            yield outcome

    output = tmp_path / "found"
    with DetectorClient(address) as client, pytest.raises(Exception, match="1 of 3 images failed"):
        write_report(paths, outcomes(client), output)
    expected = "1.jpg: its picture is not drawn: the file cannot be read (No such file"
    assert expected in capsys.readouterr().err
    assert {record["image_id"] for record in json.loads((output / "detections.json").read_text())}
    assert (output / "2.png").exists()


def test_names_are_shown_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [Path(name) for name in (":cat:.jpg", "[bold]street[/bold].jpg")]
    reasons = [ImageError("sent to localhost:abc"), ImageError("[red]")]
    with pytest.raises(Exception, match="2 of 2 images failed"):
        write_report(paths, reasons, tmp_path)
    said = capsys.readouterr().err
    assert ":cat:.jpg: sent to localhost:abc" in said
    assert "[bold]street[/bold].jpg: [red]" in said
