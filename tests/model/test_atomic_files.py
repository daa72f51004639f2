import os
from pathlib import Path

import pytest

from maskrcnn_trt.model.atomic_files import atomic_write, check_creatable


@pytest.mark.parametrize("name", ["model.pth", "html", "a.html.bak", "a\0.html", "\ud800.html"])
def test_other_names_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError, match="name"):
        check_creatable(tmp_path / name, ".html")
    check_creatable(tmp_path / "A.HTML", ".html")
    for device in ("/dev/null", "/dev/stdout"):
        check_creatable(Path(device), ".html")


@pytest.mark.parametrize("durable", [True, False])
def test_file_is_flushed_before_it_takes_its_name(
    durable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "name"
    synced = []

    def record_sync(descriptor: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{descriptor}"), path.exists()))

    monkeypatch.setattr(os, "fsync", record_sync)
    with atomic_write(path, durable=durable) as file:
        file.write(b"content")
        (partial,) = tmp_path.glob(".name.*.partial")
    assert path.read_bytes() == b"content"
    assert list(tmp_path.iterdir()) == [path]
    assert synced == ([(str(partial), False), (str(tmp_path), True)] if durable else [])


def test_failed_write_keeps_the_earlier_content(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 255)  # the longest name that file systems allow
    path.write_bytes(b"earlier")
    with pytest.raises(ZeroDivisionError):
        _fail_halfway(path)
    assert path.read_bytes() == b"earlier"
    assert list(tmp_path.iterdir()) == [path]


def _fail_halfway(path: Path) -> None:
    with atomic_write(path) as file:
        file.write(b"half of the cont")
        raise ZeroDivisionError


def test_pipes_are_written_and_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with atomic_write(path) as file:
        file.write(b"content")
    assert os.read(reader, 100) == b"content"
    os.close(reader)
    assert path.is_fifo()
    assert [*tmp_path.iterdir()] == [path]


def test_an_error_of_a_full_disk_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "new"
    with pytest.raises(OSError, match="No space left") as error:
        _fill_disk(path)
    assert error.value.filename == str(path)
    assert not list(tmp_path.iterdir())


def _fill_disk(path: Path) -> None:
    with atomic_write(path), Path("/dev/full").open("wb", buffering=0) as full:
        full.write(b"x")
