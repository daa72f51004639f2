"""The commands `maskrcnn data download`, `verify` and `extract`, with a real HTTP server."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from coco_mirror import ADDRESSES, mirror_files, write_checksums
from faulty_server import Fault, Site, serving

from maskrcnn_trt.training.config import DatasetConfig
from maskrcnn_trt.training.data.coco.dataset import CocoDataset
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
    """Return the output without line breaks and table borders."""
    return " ".join(result.output.replace("│", " ").split())


def repair(site: Site, root: Path, result: Result) -> None:
    """Run the commands that `verify` printed, with the mirror as source."""
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
    asked = len(site.requested_ranges)
    assert download(site, root, "--extract").exit_code == 0
    assert len(site.requested_ranges) == asked == 3


def test_one_part(site: Site, root: Path):
    assert download(site, root, "--part", "val", "--extract").exit_code == 0
    assert {p.name for p in root.glob("[!.]*")} == {"val2017.zip", "val2017"}
    assert verify(root, "--part", "val").exit_code == 0
    result = verify(root)
    assert result.exit_code == 1
    assert "train2017: repair it with" in result.output
    repair(site, root, result)
    assert verify(root).exit_code == 0


def test_published_sizes_are_checked_by_default(site: Site, root: Path):
    result = call(*words("download", root, "--base-url", site.url, "--part", "val"))
    assert result.exit_code != 0
    assert "815585330" in str(result.exception)
    assert not list(root.glob("val2017*"))


def test_verify_finds_faults_and_prints_repair_commands(site: Site, root: Path):
    download(site, root, "--extract")
    image = root / "train2017" / "000000000002.jpg"
    image.write_bytes(image.read_bytes()[:-1] + b"?")
    with (root / "val2017.zip").open("ab") as archive:
        archive.write(b"more")
    (root / "annotations" / "instances_val2017.json").unlink()
    result = verify(root)
    assert result.exit_code == 1
    assert result.output.count("repair it with") == 4  # also val2017, which cannot be compared
    repair(site, root, result)
    assert verify(root).exit_code == 0


def test_folders_without_archives_are_compared_with_the_annotations(site: Site, root: Path):
    download(site, root, "--extract")
    for address in ADDRESSES.values():
        (root / address.rpartition("/")[2]).unlink()
    assert verify(root, "--images").exit_code == 0

    first, second, third, _ = sorted((root / "train2017").iterdir())
    third.write_bytes(third.read_bytes()[:500])
    shutil.copy(first, root / "train2017" / "unlisted.jpg")
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
    repair(site, root, verify(root))
    assert verify(root).exit_code == 0


def test_missing_annotations_are_repaired(site: Site, root: Path):
    download(site, root, "--part", "val", "--extract")
    (root / "val2017.zip").unlink()
    result = verify(root, "--part", "val")
    assert result.exit_code == 1
    assert "cannot be checked" in text_of(result)
    repair(site, root, result)
    assert verify(root, "--part", "val").exit_code == 0
    assert not (root / "val2017.zip").exists()


def test_paths_are_printed_without_markup(root: Path):
    strange = root.with_name("[bold]my :car: data")
    (strange / "val2017").mkdir(parents=True)
    result = call(*words("verify", strange, "--part", "val"))
    assert result.exit_code == 1
    printed = "".join(result.output.replace("│", "").split())
    assert printed.count("[bold]my:car:data") == 3


def test_printed_commands_do_not_read_a_folder_as_an_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    result = call("verify", "coco2017", "./-coco", "--part", "val")
    assert "maskrcnn data download coco2017 ./-coco --part val --extract" in result.output


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--base-url", "ftp://host"], "'ftp://host'"),
        (["--part", "test"], "'test' is not one of"),
        (["--checksums", __file__], "`CHECKSUM FILE`"),
    ],
)
def test_invalid_options_are_named(root: Path, options: list[str], text: str):
    result = call(*words("download", root, *options))
    assert result.exit_code == 2
    assert text in text_of(result)
    assert not root.exists()


# Program that runs `python ARGUMENTS...` with a maximum file size in bytes, its first argument. The
# argument `preexec_fn` of `Popen` would fork this process, whose threads of gRPC may then abort.
_LIMIT_FILE_SIZE = """
import os, resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""


def start(
    arguments: list[str], prefix: Sequence[str] = (), **options: Any
) -> "subprocess.Popen[str]":
    command = [sys.executable, *prefix, "-m", "maskrcnn_trt", "data", *arguments]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)


def last_error_line_with_file_size_limit(arguments: list[str], limit: int) -> str:
    """Run a command that cannot write files of more bytes than the limit."""
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with start(arguments, ("-c", _LIMIT_FILE_SIZE, str(limit)), env=env) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    return str(errors.splitlines()[-1])


def test_a_killed_download_resumes(site: Site, root: Path):
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
    assert site.requested_ranges == [None, f"bytes={arrived}-"]
    assert verify(root, "--part", "train").exit_code == 0


def test_a_full_disk_keeps_the_partial_file(site: Site, root: Path):
    arguments = words("download", root, "--part", "train", *from_mirror(site, root))
    error = last_error_line_with_file_size_limit(arguments, 2000)
    assert error.startswith("Error: cannot write ")
    assert "2000 bytes are kept" in error
    assert download(site, root, "--part", "train").exit_code == 0
    assert site.requested_ranges == [None, "bytes=2000-"]


def test_a_full_disk_leaves_no_part_of_an_extraction(site: Site, root: Path):
    download(site, root, "--part", "val")
    arguments = words("extract", root, "--part", "val")
    error = last_error_line_with_file_size_limit(arguments, 2000)
    assert error.startswith("Error: cannot extract ")
    assert {p.name for p in root.iterdir() if p.suffix != ".lock"} == {"val2017.zip"}
