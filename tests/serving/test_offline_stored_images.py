"""Image listing of `predict --ray` in files, folders and buckets, with unusual names."""

import os
from pathlib import Path
from urllib.parse import quote

import pytest

pytest.importorskip("pyarrow.fs")
pytest.importorskip("ray")

from maskrcnn_trt.model.image_limits import MAX_FILE_BYTES, ImageError
from maskrcnn_trt.serving.errors import ServingError
from maskrcnn_trt.serving.ray_prediction import StoredImages, read_image, stored_images

IMAGES = {
    "_MG_0001.jpg",
    ".hidden.png",
    "what?.JPG",
    "half?of.webp",
    "a #1 at 50%.jpeg",
    "quoted%20already.jpg",
    "semi;colon:ö\\[x].png",
    "_2024/05/deep.jpg",
    ".thumbnails/small.png",
}
OTHERS = {"notes.txt", "jpg", "_SUCCESS", "picture.jpg.gz"}
_SIGNATURE = b"\xff\xd8\xff"  # of JPEG


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for name in IMAGES | OTHERS:
        path = tmp_path / "of #1?" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_SIGNATURE + name.encode())
    return str(tmp_path / "of #1?")


@pytest.fixture
def bucket(store: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Create a folder with the same content in a bucket, and return its address."""
    boto3 = pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", store)
    objects = boto3.resource("s3", endpoint_url=store, region_name="us-east-1").Bucket("bucket")
    objects.create()
    for name in IMAGES | OTHERS:
        objects.put_object(Key=f"of #1?/{name}", Body=_SIGNATURE + name.encode())
    return "s3://bucket/of #1%3F"


def contents(images: StoredImages) -> list[str]:
    files = [read_image(images.stores[store], path) for store, path in images.paths]
    return [content.removeprefix(_SIGNATURE).decode() for content in files]


@pytest.mark.parametrize("source", ["folder", "bucket"])
def test_folders_contribute_files_with_an_image_suffix(
    source: str, request: pytest.FixtureRequest
) -> None:
    address = request.getfixturevalue(source)
    images = stored_images([address])
    assert sorted(contents(images)) == sorted(IMAGES)
    assert images.paths == tuple(sorted(images.paths))
    assert stored_images([f"{address}/"]) == images


@pytest.mark.parametrize("source", ["folder", "bucket"])
def test_files_may_have_any_name(source: str, request: pytest.FixtureRequest) -> None:
    address = request.getfixturevalue(source)
    names = sorted(IMAGES | OTHERS)
    quoted = [quote(name) if "://" in address else name for name in names]
    files = [f"{address}/{name}" for name in quoted]
    assert contents(stored_images(files)) == names


def test_several_stores_and_duplicate_sources(folder: str, bucket: str) -> None:
    both = stored_images([folder, bucket, f"{folder}/_MG_0001.jpg", bucket])
    assert len(both.stores) == 2
    assert sorted(contents(both)) == sorted([*IMAGES, *IMAGES])


def test_missing_sources(folder: str, bucket: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ServingError, match=r"no image found in \S+/empty \(\.bmp, \.jpeg"):
        stored_images([str(tmp_path / "empty")])
    for missing in (f"{folder}/none.jpg", f"{bucket}/none.jpg"):
        with pytest.raises(ServingError, match=r"/none\.jpg does not exist"):
            stored_images([bucket, missing])
    (path,) = stored_images([f"{folder}/_MG_0001.jpg"]).paths
    images = stored_images([folder])
    Path(path[1]).unlink()
    with pytest.raises(ImageError, match=r"cannot be read"):
        contents(images)


def test_huge_files_and_devices_are_rejected_unread(tmp_path: Path) -> None:
    huge = tmp_path / "huge.jpg"
    huge.touch()
    os.truncate(huge, MAX_FILE_BYTES + 1)
    for path, reason in ((str(huge), "bytes"), ("/dev/zero", "device")):
        images = stored_images([path])
        with pytest.raises(ImageError, match=reason):
            contents(images)
