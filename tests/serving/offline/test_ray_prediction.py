"""Detection with a real Ray on this machine, in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from click.testing import CliRunner

from maskrcnn_trt.serving.predict_command import predict

Encode = Callable[..., bytes]


def maskrcnn(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", **variables}
    command = [sys.executable, "-m", "maskrcnn_trt", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)


def pictures(picture: Encode) -> dict[str, bytes]:
    return {f"{n}.jpg": picture(n, (120, 200) if n % 2 else (200, 120)) for n in range(6)}


def found_alone(bundle: Path, folder: Path, output: Path) -> list[dict[str, Any]]:
    """What `predict` finds without Ray."""
    words = [str(bundle), str(folder), "--score-threshold", "0.2", "-o", str(output)]
    alone = CliRunner().invoke(predict, words)
    assert alone.exit_code == 0, alone.output
    found: list[dict[str, Any]] = json.loads((output / "detections.json").read_text())
    return found


def found_in(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same in the rows that Ray wrote."""
    return [
        {"image_id": int(Path(row["path"]).stem), **detection}
        for row in sorted(rows, key=lambda row: row["path"])
        for detection in row["detections"]
    ]


def found(row: dict[str, Any]) -> list[dict[str, Any]]:
    """What was found in one row's image, by whatever name."""
    return [detection | {"image_id": 0} for detection in row["detections"]]


@pytest.mark.slow
def test_ray_finds_what_predict_finds(bundle: Path, picture: Encode, tmp_path: Path) -> None:
    pytest.importorskip("ray")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, image in pictures(picture).items():
        (folder / name).write_bytes(image)
    common = ("--score-threshold", "0.2", "-o")
    expected = found_alone(bundle, folder, tmp_path / "a")

    (folder / "bad.png").write_bytes(b"no image")
    (folder / "notes.txt").write_text("no picture")
    (folder / "_x").mkdir()
    same = [folder / "_MG_0001.jpg", folder / "_x" / "half?of #1.jpg", tmp_path / "picture.data"]
    for path in same:
        path.write_bytes(picture(0, (200, 120)))
    unreadable = "/proc/self/mem"
    words = ("predict", bundle, folder, same[-1], unreadable, "--ray", *common, tmp_path / "#b")
    without_engine = maskrcnn(*words, "--backend", "tensorrt")
    assert without_engine.returncode == 1
    assert "Ray could not go on" in without_engine.stderr.splitlines()[-1]
    assert "no fp32 tensorrt artefact" in without_engine.stderr.splitlines()[-1]
    result = maskrcnn(*words)
    assert result.returncode == 1
    assert "2 of 11 images failed" in result.stderr
    written = parquet.read_table(tmp_path / "#b").to_pylist()
    rows = {Path(row["path"]).stem: row for row in written}
    for path in same:
        row = rows.pop(path.stem)
        assert row["path"] == str(path)
        assert found(row) == found(rows["0"])
    assert "the file cannot be read" in rows.pop("mem")["error"]
    assert rows.keys() == {*"012345", "bad"}
    bad = rows.pop("bad")
    assert bad["error"] == "the data is no JPEG, PNG or WebP image"
    assert bad["detections"] is None
    assert found_in([*rows.values()]) == expected
    assert (rows["0"]["height"], rows["0"]["width"]) == (200, 120)

    again = maskrcnn(*words)
    assert again.returncode == 1
    assert "holds files already; choose another folder" in again.stderr


@pytest.mark.slow
def test_ray_reads_and_writes_buckets(
    bundle: Path, picture: Encode, tmp_path: Path, store: str
) -> None:
    boto3 = pytest.importorskip("boto3")
    parquet = pytest.importorskip("pyarrow.parquet")
    bucket = boto3.resource("s3", endpoint_url=store, region_name="us-east-1").Bucket("bucket")
    bucket.create()
    for name, image in pictures(picture).items():
        (tmp_path / name).write_bytes(image)
        bucket.put_object(Key=f"pictures/{name}", Body=image)
    expected = found_alone(bundle, tmp_path, tmp_path / "alone")
    place = f"endpoint_override={quote(store, safe='')}"

    def rows_in(folder: str) -> list[dict[str, Any]]:
        objects = [o for o in bucket.objects.filter(Prefix=folder) if o.key.endswith(".parquet")]
        tables = [parquet.read_table(BytesIO(o.get()["Body"].read())) for o in objects]
        return [row for table in tables for row in table.to_pylist()]

    def predicted(source: str, output: str, **variables: str) -> subprocess.CompletedProcess[str]:
        words = ("predict", bundle, source, "--ray", "--score-threshold", "0.2", "-o", output)
        return maskrcnn(*words, **variables)

    by_variable = predicted("s3://bucket/pictures", "s3://bucket/one", AWS_ENDPOINT_URL=store)
    by_address = predicted(f"s3://bucket/pictures?{place}", f"s3://bucket/the #2?{place}")
    for result, folder in ((by_variable, "one"), (by_address, "the #2")):
        assert result.returncode == 0, result.stderr
        assert found_in(rows_in(folder)) == expected

    nothing = predicted("s3://bucket/none", "s3://bucket/three", AWS_ENDPOINT_URL=store)
    assert nothing.returncode == 1
    assert "there is no image to detect in: bucket/none" in nothing.stderr.splitlines()[-1]
    gone = predicted(
        "s3://bucket/pictures", "s3://bucket/four", AWS_ENDPOINT_URL="http://localhost:1"
    )
    assert gone.returncode == 1
    assert "images or results cannot be reached" in gone.stderr.splitlines()[-1]
    assert "at Amazon or where AWS_ENDPOINT_URL says" in gone.stderr.splitlines()[-1]


def test_words_that_do_not_go_together(bundle: Path, tmp_path: Path) -> None:
    address = CliRunner().invoke(predict, [str(bundle), "s3://bucket/folder"])
    assert address.exit_code == 2
    assert "s3://bucket/folder is an address, which is read only with --ray" in address.stderr
    words = [str(bundle), str(tmp_path), "--ray", "--format", "coco"]
    formats = CliRunner().invoke(predict, words)
    assert formats.exit_code == 2
    assert "--format is of no use with --ray" in formats.stderr
