"""`predict --ray` with a real Ray, in a subprocess."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
from click.testing import CliRunner

from maskrcnn_trt.serving.commands.predict import predict

Encode = Callable[..., bytes]


# Ray and the imports take longer than the predictions: all commands share them. The first command
# starts and stops a Ray of its own.
COMMANDS_IN_ONE_PROCESS = """
import contextlib, io, json, os, sys
from pathlib import Path
import ray
from maskrcnn_trt import cli

outcomes, commands, results = [], json.loads(sys.argv[1]), Path(sys.argv[2])
for number, (words, variables) in enumerate(commands):
    if number == 1:
        ray.init(num_cpus=2, include_dashboard=False)
    os.environ.update(variables)
    sys.argv = ["maskrcnn", *words]
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            cli.main()
        except SystemExit as end:
            outcomes.append((end.code or 0, errors.getvalue()))
results.write_text(json.dumps(outcomes))
"""


class Outcome(NamedTuple):
    returncode: int
    stderr: str


def maskrcnn(
    commands: Sequence[tuple[Sequence[object], dict[str, str]]], results: Path, **variables: str
) -> list[Outcome]:
    """Run commands one after another; each has its own environment variables."""
    words = json.dumps([([*map(str, words)], variables) for words, variables in commands])
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", **variables}
    command = [sys.executable, "-c", COMMANDS_IN_ONE_PROCESS, words, str(results)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=480, env=environment)
    assert run.returncode == 0, run.stderr
    return [Outcome(*outcome) for outcome in json.loads(results.read_text())]


def pictures(picture: Encode) -> dict[str, bytes]:
    return {f"{n}.jpg": picture(n, (120, 200) if n % 2 else (200, 120)) for n in range(6)}


def results_without_ray(bundle: Path, folder: Path, output: Path) -> list[dict[str, Any]]:
    """Return the COCO results of `predict` without Ray."""
    words = [str(bundle), str(folder), "--score-threshold", "0.2", "-o", str(output)]
    alone = CliRunner().invoke(predict, words)
    assert alone.exit_code == 0, alone.output
    results: list[dict[str, Any]] = json.loads((output / "detections.json").read_text())
    return results


def results_in(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the COCO results in the rows that Ray wrote."""
    return [
        {"image_id": int(Path(row["path"]).stem), **detection}
        for row in sorted(rows, key=lambda row: row["path"])
        for detection in row["detections"]
    ]


def anonymous_results(row: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of a row with the same image ID for all rows."""
    return [detection | {"image_id": 0} for detection in row["detections"]]


def rows_in(folder: Path) -> list[dict[str, Any]]:
    from pyarrow import parquet

    rows: list[dict[str, Any]] = parquet.read_table(folder).to_pylist()
    return rows


@pytest.mark.slow
def test_ray_agrees_with_predict_on_folders_and_buckets(
    bundle: Path, picture: Encode, tmp_path: Path, store: str
) -> None:
    pytest.importorskip("ray")
    boto3 = pytest.importorskip("boto3")
    bucket = boto3.resource("s3", endpoint_url=store, region_name="us-east-1").Bucket("bucket")
    bucket.create()
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, image in pictures(picture).items():
        (folder / name).write_bytes(image)
        bucket.put_object(Key=f"pictures/{name}", Body=image)
    expected = results_without_ray(bundle, folder, tmp_path / "a")
    (folder / "bad.png").write_bytes(b"no image")
    (folder / "notes.txt").write_text("no picture")
    (folder / "_x").mkdir()
    same = [folder / "_MG_0001.jpg", folder / "_x" / "half?of #1.jpg", tmp_path / "picture.data"]
    for path in same:
        path.write_bytes(picture(0, (200, 120)))
    unreadable = "/proc/self/mem"

    def predict_with_ray(*words: object) -> list[object]:
        return ["predict", bundle, "--ray", "--score-threshold", "0.2", *words]

    in_folder = predict_with_ray(folder, same[-1], unreadable, "-o", tmp_path / "#b")
    parameters = f"endpoint_override={quote(store, safe='')}"
    address = f"s3://bucket/pictures?{parameters}", "-o", f"s3://bucket/the #2?{parameters}"
    unreachable = {"AWS_ENDPOINT_URL": "http://localhost:1"}
    no_engine, result, again, by_variable, nothing, by_address, gone = maskrcnn(
        [
            ([*in_folder, "--backend", "tensorrt"], {}),
            (in_folder, {}),
            (in_folder, {}),
            (predict_with_ray("s3://bucket/pictures", "-o", "s3://bucket/one"), {}),
            (predict_with_ray("s3://bucket/none", "-o", "s3://bucket/three"), {}),
            (predict_with_ray(*address), unreachable),
            (predict_with_ray("s3://bucket/pictures", "-o", "s3://bucket/four"), unreachable),
        ],
        tmp_path / "outcomes.json",
        AWS_ENDPOINT_URL=store,
    )

    assert no_engine.returncode == 1
    assert "Ray failed" in no_engine.stderr.splitlines()[-1]
    assert "no fp32 tensorrt artifact" in no_engine.stderr.splitlines()[-1]
    assert result.returncode == 1
    assert "2 of 11 images failed" in result.stderr
    rows = {Path(row["path"]).stem: row for row in rows_in(tmp_path / "#b")}
    for path in same:
        row = rows.pop(path.stem)
        assert row["path"] == str(path)
        assert anonymous_results(row) == anonymous_results(rows["0"])
    assert "cannot be read" in rows.pop("mem")["error"]
    assert rows.keys() == {*"012345", "bad"}
    bad = rows.pop("bad")
    assert bad["error"] == "the data is not a JPEG, PNG, WebP, BMP or TIFF image"
    assert bad["detections"] is None
    assert results_in([*rows.values()]) == expected
    assert (rows["0"]["height"], rows["0"]["width"]) == (200, 120)
    assert again.returncode == 1
    assert "choose another folder" in again.stderr

    for outcome, name in ((by_variable, "one"), (by_address, "the #2")):
        assert outcome.returncode == 0, outcome.stderr
        copy = tmp_path / name
        copy.mkdir()
        for item in bucket.objects.filter(Prefix=name):
            if item.key.endswith(".parquet"):
                (copy / Path(item.key).name).write_bytes(item.get()["Body"].read())
        assert results_in(rows_in(copy)) == expected
    assert nothing.returncode == 1
    assert "bucket/none" in nothing.stderr.splitlines()[-1]
    assert gone.returncode == 1
    assert "AWS_ENDPOINT_URL" in gone.stderr.splitlines()[-1]


def test_faults_without_a_cluster(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jpg").touch()
    odd = tmp_path / "odd" / os.fsdecode(b"\xff.jpg")
    odd.parent.mkdir()
    odd.touch()
    for source, cluster, reason in [
        (str(odd), "", r"odd/\\xff.jpg is not UTF-8"),
        (str(odd.parent), "", r"odd/\\xff.jpg is not UTF-8"),
        (str(tmp_path / "a.jpg"), "auto", "RAY_ADDRESS"),
    ]:
        command = "from maskrcnn_trt.cli import main; main()"
        words = [sys.executable, "-c", command, "predict", str(bundle), source, "--ray"]
        run = subprocess.run(
            [*words, "-o", str(tmp_path / "results")],
            capture_output=True, text=True, env={**os.environ, "RAY_ADDRESS": cluster},
        )  # fmt: skip
        assert run.returncode == 1
        assert run.stderr.splitlines()[-1].startswith("Error: ")
        assert re.search(reason, run.stderr)


def test_conflicting_options_of_predict(bundle: Path, tmp_path: Path) -> None:
    address = CliRunner().invoke(predict, [str(bundle), "s3://bucket/folder"])
    assert address.exit_code == 2
    assert "s3://bucket/folder is an address" in address.stderr
    words = [str(bundle), str(tmp_path), "--ray", "--format", "coco"]
    formats = CliRunner().invoke(predict, words)
    assert formats.exit_code == 2
    assert "--format cannot be combined with --ray" in formats.stderr
    folder = CliRunner().invoke(predict, [*words[:3], "-o", "/proc/results"])
    assert folder.exit_code == 2
    assert "no file can be created in /proc" in folder.stderr
