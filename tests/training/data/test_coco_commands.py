"""COCO brought by the commands that users type, from a real server."""

import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from coco_mirror import ADDRESSES, mirror_files, write_checksums
from faulty_server import Fault, Site, serving

from maskrcnn_trt.training.config import DatasetConfig
from maskrcnn_trt.training.data.coco import CocoDataset
from maskrcnn_trt.training.data.commands import data


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    (tmp_path / "scratch").mkdir()
    files = mirror_files(tmp_path / "scratch")
    write_checksums(tmp_path / "MD5SUMS", files)
    with serving(Site(files)) as site:
        yield site


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "data" / "coco 2017"


def words(command: str, root: Path, *options: str) -> list[str]:
    return [command, "coco2017", str(root), *options]


def from_mirror(site: Site, root: Path) -> tuple[str, ...]:
    return ("--base-url", site.url, "--checksums", str(root.parents[1] / "MD5SUMS"))


def call(*arguments: str) -> Result:
    return CliRunner().invoke(data, arguments)


def download(site: Site, root: Path, *options: str) -> Result:
    return call(*words("download", root, *from_mirror(site, root), *options))


def verify(root: Path, *options: str) -> Result:
    checksums = str(root.parents[1] / "MD5SUMS")
    return call(*words("verify", root, "--checksums", checksums, *options))


def text_of(result: Result) -> str:
    """What was printed, without line breaks and the lines of tables."""
    return " ".join(result.output.replace("│", " ").split())


def mend(site: Site, root: Path, result: Result) -> None:
    """Do what verify says, at the mirror."""
    for line in result.output.splitlines():
        if line.startswith(("  rm ", "  maskrcnn ")):
            *remove, command = line.split(" && ")
            for words_ in map(shlex.split, remove):
                assert words_[0] == "rm"
                Path(words_[1]).unlink()
            verb, *arguments = shlex.split(command)[2:]
            mirror = from_mirror(site, root) if verb == "download" else ()
            assert call(verb, *arguments, *mirror).exit_code == 0


def test_download_and_extraction_give_a_data_set_that_trains(site: Site, root: Path):
    result = download(site, root, "--extract")
    assert result.exit_code == 0, result.output
    for split, count in (("train", 4), ("val", 2)):
        annotations = root / f"annotations/instances_{split}2017.json"
        dataset = CocoDataset(
            DatasetConfig(images=root / f"{split}2017", annotations=annotations), "refuse"
        )
        assert len(dataset) == count
    assert verify(root).exit_code == 0
    asked = len(site.ranges_asked)
    assert download(site, root, "--extract").exit_code == 0
    assert len(site.ranges_asked) == asked == 3


def test_one_part(site: Site, root: Path):
    assert download(site, root, "--part", "val", "--extract").exit_code == 0
    assert {p.name for p in root.glob("[!.]*")} == {"val2017.zip", "val2017"}
    assert verify(root, "--part", "val").exit_code == 0
    result = verify(root)
    assert result.exit_code == 1
    assert "train2017: mend it with" in result.output
    mend(site, root, result)
    assert verify(root).exit_code == 0


def test_published_checksums_are_what_counts(site: Site, root: Path):
    result = call(*words("download", root, "--base-url", site.url, "--part", "val"))
    assert result.exit_code != 0
    assert "the published file 815585330; name a mirror" in str(result.exception)
    assert not list(root.glob("val2017*"))


def test_verify_finds_what_is_wrong_and_how_to_mend_it(site: Site, root: Path):
    download(site, root, "--extract")
    image = root / "train2017" / "000000000002.jpg"
    image.write_bytes(image.read_bytes()[:-1] + b"?")
    with (root / "val2017.zip").open("ab") as archive:
        archive.write(b"more")
    (root / "annotations" / "instances_val2017.json").unlink()
    result = verify(root)
    assert result.exit_code == 1
    assert result.output.count("mend it with") == 4  # val2017 as well: it cannot be compared
    mend(site, root, result)
    assert verify(root).exit_code == 0


def test_folders_without_archives_are_held_to_the_annotations(site: Site, root: Path):
    download(site, root, "--extract")
    for address in ADDRESSES.values():
        (root / address.rpartition("/")[2]).unlink()
    assert verify(root, "--images").exit_code == 0

    first, second, third, _ = sorted((root / "train2017").iterdir())
    third.write_bytes(third.read_bytes()[:500])
    shutil.copy(first, root / "train2017" / "of nobody.jpg")
    assert verify(root).exit_code == 0
    result = verify(root, "--images")
    assert result.exit_code == 1
    assert "1 file unreadable" in text_of(result)
    first.unlink()
    second.write_bytes(b"")
    result = verify(root)
    assert result.exit_code == 1
    assert "2 files missing or empty: 000000000001.jpg," in text_of(result)

    (root / "annotations" / "instances_val2017.json").write_text("[")
    result = verify(root, "--part", "annotations")
    assert result.exit_code == 1
    mend(site, root, verify(root))
    assert verify(root).exit_code == 0


def test_missing_annotations_are_what_is_mended(site: Site, root: Path):
    download(site, root, "--part", "val", "--extract")
    (root / "val2017.zip").unlink()
    result = verify(root, "--part", "val")
    assert result.exit_code == 1
    assert "cannot be checked" in text_of(result)
    mend(site, root, result)
    assert verify(root, "--part", "val").exit_code == 0
    assert not (root / "val2017.zip").exists()


def test_paths_are_printed_as_they_are(root: Path):
    strange = root.with_name("[bold]my :car: data")
    (strange / "val2017").mkdir(parents=True)
    result = call(*words("verify", strange, "--part", "val"))
    assert result.exit_code == 1
    printed = "".join(result.output.replace("│", "").split())
    assert printed.count("[bold]my:car:data") == 3


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--base-url", "ftp://host"], "'ftp://host' does not begin with http:// or https://"),
        (["--part", "test"], "'test' is not one of"),
        (["--checksums", __file__], "is not of md5sum's form `MD5 FILE`"),
    ],
)
def test_unusable_option_is_named(root: Path, options: list[str], sentence: str):
    result = call(*words("download", root, *options))
    assert result.exit_code == 2
    assert sentence in text_of(result)
    assert not root.exists()


def start(arguments: list[str], **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "maskrcnn_trt", "data", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)


def last_words_with_small_files(arguments: list[str], limit: int) -> str:
    """What a command says at last that may write no file of more bytes than the limit."""

    def limit_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with start(arguments, preexec_fn=limit_files, env=env) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    return str(errors.splitlines()[-1])


def test_killed_download_goes_on(site: Site, root: Path):
    site.faults = [Fault(silent_after=20_000)]
    partial = root / "train2017.zip.partial"
    arguments = words("download", root, "--part", "train", *from_mirror(site, root))
    with start(arguments) as process:
        assert site.half_sent.wait(30)
        while not (partial.exists() and partial.stat().st_size):
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    arrived = partial.stat().st_size
    assert not (root / "train2017.zip").exists()
    assert download(site, root, "--part", "train").exit_code == 0
    content = site.files[ADDRESSES["train"]]
    assert (root / "train2017.zip").read_bytes() == content
    assert site.ranges_asked == [None, f"bytes={arrived}-"]
    assert verify(root, "--part", "train").exit_code == 0


def test_full_disk_keeps_what_has_arrived(site: Site, root: Path):
    arguments = words("download", root, "--part", "train", *from_mirror(site, root))
    sentence = last_words_with_small_files(arguments, 2000)
    assert sentence.startswith("Error: cannot write ")
    assert sentence.endswith("2000 bytes are kept, and the same command goes on from there")
    assert download(site, root, "--part", "train").exit_code == 0
    assert site.ranges_asked == [None, "bytes=2000-"]


def test_full_disk_leaves_nothing_of_an_extraction(site: Site, root: Path):
    download(site, root, "--part", "val")
    sentence = last_words_with_small_files(words("extract", root, "--part", "val"), 2000)
    assert sentence.startswith("Error: cannot extract ")
    assert {p.name for p in root.iterdir() if p.suffix != ".lock"} == {"val2017.zip"}
