"""Extraction of archives: complete and inside the folder, or not at all."""

import io
import itertools
import os
import zipfile
from pathlib import Path

import pytest
from coco_mirror import zip_of

from maskrcnn_trt.model.download.local_files import DownloadError
from maskrcnn_trt.training.data.coco.dataset import DataError
from maskrcnn_trt.training.data.download.extraction import extract_archive, missing_members

FILES = {f"val2017/{n}.jpg": os.urandom(1000 + n) for n in range(5)}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "val2017.zip"
    path.write_bytes(zip_of({"val2017/": b"", **FILES}))
    return path


def visible(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}


def assert_extracted(folder: Path) -> None:
    found = {f"val2017/{path.name}": path.read_bytes() for path in folder.iterdir()}
    assert found == FILES
    assert visible(folder.parent) == {"val2017.zip", "val2017"}
    assert not (folder.parent / ".val2017.partial").exists()


def assert_refused(archive: Path, pattern: str, error: type[Exception] = DataError) -> None:
    with pytest.raises(error, match=pattern):
        extract_archive(archive, archive.with_suffix(""))
    assert visible(archive.parent) == {"val2017.zip"}
    assert not (archive.parent / ".val2017.partial").exists()


def test_everything_is_extracted_with_its_progress(archive: Path):
    """A later comparison with the folder shows its progress too."""
    seen = []
    folder = archive.with_suffix("")
    assert extract_archive(archive, folder, lambda *progress: seen.append(progress)) == 5
    assert_extracted(folder)
    size = sum(map(len, FILES.values()))
    assert {step for step, _, _ in seen} == {"extracting val2017.zip"}
    assert seen[-1][1:] == (size, size)
    done = list(itertools.accumulate(map(len, FILES.values())))
    for compare in (missing_members, extract_archive):
        seen.clear()
        compare(archive, folder, lambda *progress: seen.append(progress))
        assert seen == [("comparing val2017", part, size) for part in done]


def test_only_missing_and_altered_files_are_extracted(archive: Path):
    folder = archive.with_suffix("")
    extract_archive(archive, folder)
    before = (folder / "0.jpg").stat()
    (folder / "1.jpg").unlink()
    (folder / "2.jpg").write_bytes(b"cut")
    (folder / "3.jpg").write_bytes(bytes(1003))  # of the right size
    assert missing_members(archive, folder) == [f"val2017/{n}.jpg" for n in (1, 2, 3)]
    assert extract_archive(archive, folder) == 3
    assert_extracted(folder)
    assert (folder / "0.jpg").stat().st_ino == before.st_ino
    assert extract_archive(archive, folder) == 0


def test_other_files_in_the_folder_are_kept(archive: Path):
    folder = archive.with_suffix("")
    folder.mkdir()
    (folder / "mine.json").write_text("{}")
    extract_archive(archive, folder)
    assert (folder / "mine.json").read_text() == "{}"
    assert len(list(folder.iterdir())) == 6


def test_remains_of_a_killed_extraction_are_discarded(archive: Path):
    partial = archive.with_name(".val2017.partial") / "val2017"
    partial.mkdir(parents=True)
    (partial / "0.jpg").write_bytes(bytes(1000))
    (partial / "not_in_the_archive.jpg").write_bytes(b"x")
    extract_archive(archive, archive.with_suffix(""))
    assert_extracted(archive.with_suffix(""))


@pytest.mark.parametrize(
    "name", ["../outside.jpg", "/outside.jpg", "val2017/../../outside.jpg", "other/x.jpg", "x.jpg"]
)
def test_file_outside_of_the_folder_is_refused(tmp_path: Path, name: str):
    archive = tmp_path / "data" / "val2017.zip"
    archive.parent.mkdir()
    archive.write_bytes(zip_of({**FILES, name: b"x"}))
    with pytest.raises(DataError, match=r"outside of val2017/; .* nothing was extracted"):
        extract_archive(archive, archive.with_suffix(""))
    assert visible(archive.parent) == {"val2017.zip"}
    assert visible(tmp_path) == {"data"}


def test_damaged_member_leaves_nothing(archive: Path):
    content = bytearray(archive.read_bytes())
    content[content.index(FILES["val2017/3.jpg"]) + 500] ^= 1
    archive.write_bytes(content)
    assert_refused(archive, r"is damaged \(Bad CRC-32 .*3.jpg.*\); delete it and")


@pytest.mark.parametrize("content", [b"", b"<html>no archive</html>", zip_of(FILES)[:3000]])
def test_damaged_archives_are_refused(archive: Path, content: bytes):
    archive.write_bytes(content)
    assert_refused(archive, r"val2017\.zip is damaged")


@pytest.mark.parametrize(("offset", "value"), [(8, 1), (10, 98)], ids=["encrypted", "PPMd"])
def test_unsupported_archives_are_refused(archive: Path, offset: int, value: int):
    content = bytearray(archive.read_bytes())
    # Offsets in a central header; in a local header, the same fields are two bytes earlier.
    content[content.rindex(b"PK\1\2") + offset] = value
    content[content.rindex(b"PK\3\4") + offset - 2] = value
    archive.write_bytes(content)
    assert_refused(archive, r"encrypted, or compressed .* delete it")


def test_an_archive_that_does_not_fit_on_the_disk_is_refused(archive: Path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as written:
        written.writestr("val2017/0.jpg", b"x")
        written.infolist()[0].file_size = 10**17  # written to the central directory only
    archive.write_bytes(buffer.getvalue())
    assert_refused(archive, r"val2017 needs 100000000\.0 GB more", DownloadError)


def test_a_missing_archive_is_an_error_with_the_command(tmp_path: Path):
    with pytest.raises(DataError, match=r"val2017\.zip .*`maskrcnn data download`"):
        extract_archive(tmp_path / "coco" / "val2017.zip", tmp_path / "coco" / "val2017")
    assert not list(tmp_path.iterdir())
