"""What a run leaves behind that is ended before its last image."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from maskrcnn_trt.model.images import ImageError
from maskrcnn_trt.serving.client import DetectorClient
from maskrcnn_trt.serving.detections import Detections
from maskrcnn_trt.serving.errors import UnreachableError
from maskrcnn_trt.serving.reports import write_report

Encode = Callable[..., bytes]

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


def images_of(results: Path) -> set[int]:
    """The ids of the images that pycocotools finds detections of."""
    coco = pytest.importorskip("pycocotools.coco")
    truth = coco.COCO()
    truth.dataset = {
        "images": [{"id": index, "height": 120, "width": 200} for index in range(9)],
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


def test_interrupted_run_leaves_the_results_so_far(
    address: str, picture: Encode, tmp_path: Path
) -> None:
    paths = pictures(tmp_path, picture, 3)
    fifo, output = tmp_path / "3.jpg", tmp_path / "found"
    os.mkfifo(fifo)  # at which the client waits for what never comes
    words = ["client", address, *map(str, paths), str(fifo), "-o", str(output)]
    words += ["--concurrency", "1", "--score-threshold", "0.2"]
    with (
        subprocess.Popen(
            [sys.executable, "-m", "maskrcnn_trt", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
        fifo.open("wb"),  # once the client has opened it, too
    ):
        process.send_signal(signal.SIGINT)
        said, complaint = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "detections in 3 images, see" in said
    assert "Traceback" not in complaint
    assert images_of(output / "detections.json") == {0, 1, 2}
    assert {path.name for path in output.iterdir()} == {
        "0.png",
        "1.png",
        "2.png",
        "detections.json",
    }


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
    (tmp_path / "detections.json").write_text("what an earlier run has found")
    (tmp_path / ".detections.json.partial").mkdir()  # as if the disk were full
    with DetectorClient(address) as client, pytest.raises(OSError, match="partial"):
        write_report(paths, client.detect_many(paths), tmp_path, ("coco",))
    assert (tmp_path / "detections.json").read_text() == "what an earlier run has found"


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
    assert "1.jpg: the file cannot be read (No such file" in capsys.readouterr().err
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
