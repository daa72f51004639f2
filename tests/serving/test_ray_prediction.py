"""Detection with a real Ray on this machine, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from maskrcnn_trt.serving.detection_commands import predict

Encode = Callable[..., bytes]


def maskrcnn(*words: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-m", "maskrcnn_trt", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


@pytest.mark.slow
def test_ray_finds_what_predict_finds(bundle: Path, picture: Encode, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "pictures"
    folder.mkdir()
    for number in range(6):
        size = (120, 200) if number % 2 else (200, 120)
        (folder / f"{number}.jpg").write_bytes(picture(number, size))
    common = ("--score-threshold", "0.2", "-o")
    alone = CliRunner().invoke(predict, [str(bundle), str(folder), *common, str(tmp_path / "a")])
    assert alone.exit_code == 0, alone.output
    expected = json.loads((tmp_path / "a" / "detections.json").read_text())

    (folder / "bad.png").write_bytes(b"no image")
    (folder / "notes.txt").write_text("no picture")
    words = ("predict", bundle, folder, "--ray", *common, tmp_path / "b")
    without_engine = maskrcnn(*words, "--backend", "tensorrt")
    assert without_engine.returncode == 1
    assert "Ray could not go on" in without_engine.stderr.splitlines()[-1]
    assert "no fp32 tensorrt artefact" in without_engine.stderr.splitlines()[-1]
    result = maskrcnn(*words)
    assert result.returncode == 1
    assert "1 of 7 images failed" in result.stderr
    rows = {Path(r["path"]).stem: r for r in parquet.read_table(tmp_path / "b").to_pylist()}
    assert rows.keys() == {*"012345", "bad"}
    bad = rows.pop("bad")
    assert bad["error"] == "the data is no JPEG, PNG or WebP image"
    assert bad["detections"] is None
    found = [
        {"image_id": int(name), **detection}
        for name, row in sorted(rows.items())
        for detection in row["detections"]
    ]
    assert found == expected
    assert (rows["0"]["height"], rows["0"]["width"]) == (200, 120)

    again = maskrcnn(*words)
    assert again.returncode == 1
    assert "holds files already; choose another folder" in again.stderr


def test_words_that_do_not_go_together(bundle: Path, tmp_path: Path) -> None:
    address = CliRunner().invoke(predict, [str(bundle), "s3://bucket/folder"])
    assert address.exit_code == 2
    assert "s3://bucket/folder is an address, which is read only with --ray" in address.stderr
    words = [str(bundle), str(tmp_path), "--ray", "--format", "coco"]
    formats = CliRunner().invoke(predict, words)
    assert formats.exit_code == 2
    assert "--format is of no use with --ray" in formats.stderr
