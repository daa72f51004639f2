"""Downloads from a real server that drops, stalls, lies and changes its mind."""

import hashlib
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from faulty_server import Fault, Site, serving

from maskrcnn_trt.training.data.coco import DataError
from maskrcnn_trt.training.data.disk import exclusive
from maskrcnn_trt.training.data.downloading import Patience, download_file

CONTENT = np.random.default_rng(0).bytes(50_000)
OTHER = np.random.default_rng(1).bytes(50_000)
HASTY = Patience(retries=2, pause=0.001, timeout=5)


def md5(content: bytes) -> str:
    return hashlib.md5(content).hexdigest()


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(Site({"file.zip": CONTENT})) as site:
        yield site


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.zip"


def download(
    site: Site, path: Path, content: bytes = CONTENT, patience: Patience = HASTY, **options: int
) -> None:
    download_file(f"{site.url}/file.zip", path, md5=md5(content), patience=patience, **options)


def visible(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}


def assert_whole(path: Path, content: bytes = CONTENT) -> None:
    assert path.read_bytes() == content
    assert visible(path.parent) == {path.name}


def interrupt(site: Site, path: Path, cut_after: int = 20_000) -> None:
    """Leave a part of the file behind, as a call that gives up."""
    site.faults.append(Fault(cut_after=cut_after))
    with pytest.raises(DataError, match=f"; {cut_after} bytes are kept, and the same command"):
        download(site, path, patience=Patience(retries=0))
    assert visible(path.parent) == {"file.zip.partial", "file.zip.partial.json"}


def test_a_file_arrives_with_its_progress(site: Site, path: Path):
    seen = []
    download_file(
        f"{site.url}/file.zip",
        path,
        md5=md5(CONTENT),
        size=len(CONTENT),
        on_progress=lambda *progress: seen.append(progress),
    )
    assert_whole(path)
    assert ("downloading file.zip", 50_000, 50_000) in seen
    assert seen[-1] == ("checking file.zip", 50_000, 50_000)


def test_an_empty_file_arrives(site: Site, path: Path):
    site.files["file.zip"] = b""
    download(site, path, b"")
    assert_whole(path, b"")


def test_a_dropped_connection_is_resumed_where_it_broke_off(site: Site, path: Path):
    site.faults = [Fault(cut_after=20_000), Fault(cut_after=10_000)]
    download(site, path)
    assert_whole(path)
    assert site.ranges_asked == [None, "bytes=20000-", "bytes=30000-"]
    assert site.bytes_sent == len(CONTENT)


@pytest.mark.parametrize("validators", [True, False])
def test_a_later_call_goes_on(site: Site, path: Path, validators: bool):
    site.validators = validators
    interrupt(site, path)
    download(site, path)
    assert_whole(path)
    assert site.bytes_sent == len(CONTENT)


def test_large_parts_do_not_use_up_the_patience(site: Site, path: Path):
    content = site.files["file.zip"] = bytes(7 << 20)
    site.faults = [Fault(cut_after=1 << 20)] * 6
    download(site, path, content, Patience(retries=1, pause=0.001))
    assert_whole(path, content)
    assert site.bytes_sent == len(content)


def test_server_without_ranges_starts_anew(
    site: Site, path: Path, caplog: pytest.LogCaptureFixture
):
    site.ranges = False
    interrupt(site, path)
    download(site, path)
    assert_whole(path)
    assert site.bytes_sent == 20_000 + len(CONTENT)
    assert "starting anew, for the server cannot resume" in caplog.text


def test_changed_file_is_not_mixed_with_the_old_one(
    site: Site, path: Path, caplog: pytest.LogCaptureFixture
):
    interrupt(site, path)
    site.files["file.zip"] = OTHER
    download(site, path, OTHER)
    assert_whole(path, OTHER)
    assert "starting anew, for the file there is another now" in caplog.text


def test_changed_length_is_noticed_where_the_server_tells_no_version(site: Site, path: Path):
    site.validators = False
    interrupt(site, path)
    site.files["file.zip"] = OTHER[:40_000]
    download(site, path, OTHER[:40_000])
    assert_whole(path, OTHER[:40_000])


def test_part_longer_than_the_file_has_become(site: Site, path: Path):
    site.validators = False
    interrupt(site, path)
    site.files["file.zip"] = OTHER[:10_000]
    download(site, path, OTHER[:10_000])
    assert_whole(path, OTHER[:10_000])


def test_damaged_note_of_the_origin_starts_anew(site: Site, path: Path):
    interrupt(site, path)
    (path.parent / "file.zip.partial.json").write_text('{"etag": ')
    download(site, path)
    assert_whole(path)
    assert site.ranges_asked == [None, None]


def test_whole_part_needs_no_server(site: Site, path: Path):
    """The process was killed between the last byte and the renaming."""
    interrupt(site, path)
    (path.parent / "file.zip.partial").write_bytes(CONTENT)
    download(site, path)
    assert_whole(path)
    assert len(site.ranges_asked) == 1


def test_server_that_tells_no_length(site: Site, path: Path):
    site.lengths = False
    download(site, path)
    assert_whole(path)


@pytest.mark.parametrize("lengths", [True, False])
def test_wrong_checksum_leaves_nothing(site: Site, path: Path, lengths: bool):
    site.lengths = lengths
    site.faults = [Fault(cut_after=0 if lengths else 30_000)]
    site.files["file.zip"] = OTHER
    with pytest.raises(DataError, match=r"not the published file: its MD5 is .* nothing was kept"):
        download(site, path)
    assert visible(path.parent) == set()


def test_other_size_is_refused_before_it_is_downloaded(site: Site, path: Path):
    site.always = Fault(silent_after=0)
    with pytest.raises(DataError, match="has 50000 bytes, the published file 60000"):
        download(site, path, size=60_000)
    assert visible(path.parent) == set()


@pytest.mark.parametrize("status", [403, 404])
def test_refusal_is_final(site: Site, path: Path, status: int):
    site.faults = [Fault(status=status)]
    with pytest.raises(DataError, match=rf"answered {status} .*; check the address, or name a"):
        download(site, path)
    assert len(site.ranges_asked) == 1


def test_busy_server_is_asked_again(site: Site, path: Path, caplog: pytest.LogCaptureFixture):
    site.faults = [Fault(status=500), Fault(status=503)]
    download(site, path)
    assert_whole(path)
    assert "the server answered 503 Service Unavailable; trying again" in caplog.text


def test_server_that_stays_busy_is_given_up(site: Site, path: Path):
    site.always = Fault(status=503)
    with pytest.raises(DataError, match="answered 503 Service Unavailable; nothing has arrived"):
        download(site, path)
    assert len(site.ranges_asked) == 3


def test_silent_server_is_left_and_asked_again(site: Site, path: Path):
    site.faults = [Fault(silent_after=20_000)]
    download(site, path, patience=Patience(retries=1, pause=0.001, timeout=0.3))
    assert_whole(path)
    assert site.bytes_sent == len(CONTENT)


def test_trickling_server_is_given_up(site: Site, path: Path):
    site.always = Fault(trickle=True)
    with pytest.raises(DataError, match=r"the server sent \d+ bytes in \d+ s; \d+ bytes are kept"):
        download(site, path, patience=Patience(retries=1, pause=0.001, timeout=0.3))
    assert len(site.ranges_asked) == 2
    assert CONTENT.startswith((path.parent / "file.zip.partial").read_bytes())


def test_nobody_listens(path: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(DataError, match="refused; nothing has arrived; try again"):
        download(Site({}, url=f"http://127.0.0.1:{port}"), path)


def test_no_room_is_noticed_at_once(site: Site, path: Path):
    site.always = Fault(announced=10**17)
    with pytest.raises(DataError, match=r"needs 100000000\.0 GB more, but its disk has only"):
        download(site, path)
    assert site.bytes_sent <= len(CONTENT)
    assert not path.exists()


def test_right_file_is_left_alone(site: Site, path: Path):
    path.write_bytes(CONTENT)
    download(site, path)
    assert_whole(path)
    assert site.ranges_asked == []


def test_wrong_file_of_the_user_is_not_replaced(site: Site, path: Path):
    path.write_bytes(OTHER)
    with pytest.raises(DataError, match=r"is there but not the published file.*; delete it"):
        download(site, path)
    assert_whole(path, OTHER)


def test_one_process_a_file(site: Site, path: Path):
    with exclusive(path), pytest.raises(DataError, match="another process is making"):
        download(site, path)
    download(site, path)
    assert_whole(path)
