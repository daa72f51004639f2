"""Which images files, folders and buckets hold, and what those with odd names hold."""

from pathlib import Path
from urllib.parse import quote

import pytest

pytest.importorskip("pyarrow.fs")

from maskrcnn_trt.model.images import ImageError
from maskrcnn_trt.serving.errors import ServingError
from maskrcnn_trt.serving.offline.stored_images import StoredImages, read_image, stored_images

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


@pytest.fixture
def folder(tmp_path: Path) -> str:
    for name in IMAGES | OTHERS:
        path = tmp_path / "of #1?" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    return str(tmp_path / "of #1?")


@pytest.fixture
def bucket(store: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a folder in a bucket with the same."""
    boto3 = pytest.importorskip("boto3")
    monkeypatch.setenv("AWS_ENDPOINT_URL", store)
    objects = boto3.resource("s3", endpoint_url=store, region_name="us-east-1").Bucket("bucket")
    objects.create()
    for name in IMAGES | OTHERS:
        objects.put_object(Key=f"of #1?/{name}", Body=name.encode())
    return "s3://bucket/of #1%3F"


def contents(images: StoredImages) -> list[str]:
    return [read_image(images.stores[store], path).decode() for store, path in images.places]


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_folders_give_all_that_is_named_as_an_image(
    place: str, request: pytest.FixtureRequest
) -> None:
    address = request.getfixturevalue(place)
    found = stored_images([address])
    assert sorted(contents(found)) == sorted(IMAGES)
    assert found.places == tuple(sorted(found.places))
    assert stored_images([f"{address}/"]) == found


@pytest.mark.parametrize("place", ["folder", "bucket"])
def test_files_are_taken_whatever_their_names(place: str, request: pytest.FixtureRequest) -> None:
    address = request.getfixturevalue(place)
    names = sorted(IMAGES | OTHERS)
    quoted = [quote(name) if "://" in address else name for name in names]
    files = [f"{address}/{name}" for name in quoted]
    assert contents(stored_images(files)) == names


def test_sources_of_several_stores_go_together_and_none_comes_twice(
    folder: str, bucket: str
) -> None:
    both = stored_images([folder, bucket, f"{folder}/_MG_0001.jpg", bucket])
    assert len(both.stores) == 2
    assert sorted(contents(both)) == sorted([*IMAGES, *IMAGES])


def test_what_is_not_there_is_named(folder: str, bucket: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ServingError, match=r"no image to detect in: \S+/empty \(\.jpeg, \.jpg"):
        stored_images([str(tmp_path / "empty")])
    for missing in (f"{folder}/none.jpg", f"{bucket}/none.jpg"):
        with pytest.raises(ServingError, match=r"no image to detect in: .*/none\.jpg is not there"):
            stored_images([bucket, missing])
    (place,) = stored_images([f"{folder}/_MG_0001.jpg"]).places
    found = stored_images([folder])
    Path(place[1]).unlink()
    with pytest.raises(ImageError, match=r"the file cannot be read"):
        contents(found)


def test_name_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "odd\udcff.jpg").touch()
    with pytest.raises(ServingError, match=r"is not UTF-8: .*odd\\xff\.jpg; rename it"):
        stored_images([str(tmp_path)])
