"""Downloads from a real server that drops connections, stalls and changes its files."""

import hashlib
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from faulty_server import Fault, Site, serving

from maskrcnn_trt.model.download.checksums import Checksum
from maskrcnn_trt.model.download.http_download import Remedies, RetryPolicy, download_file
from maskrcnn_trt.model.download.local_files import DownloadError, exclusive_lock

CONTENT = np.random.default_rng(0).bytes(50_000)
OTHER = np.random.default_rng(1).bytes(50_000)
POLICY = RetryPolicy(retries=2, pause=0.001, timeout=5)
REMEDIES = Remedies(other_source="use --base-url", trust="use --checksums")


def md5(content: bytes) -> Checksum:
    return Checksum("md5", hashlib.md5(content).hexdigest())


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(Site({"file.zip": CONTENT})) as site:
        yield site


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "file.zip"


def download(
    site: Site, path: Path, content: bytes = CONTENT, policy: RetryPolicy = POLICY, **options: int
) -> None:
    download_file(
        f"{site.url}/file.zip",
        path,
        checksum=md5(content),
        remedies=REMEDIES,
        policy=policy,
        **options,
    )


def visible(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir() if not entry.name.startswith(".")}


def assert_complete(path: Path, content: bytes = CONTENT) -> None:
    assert path.read_bytes() == content
    assert visible(path.parent) == {path.name}


def interrupt(site: Site, path: Path, cut_after: int = 20_000) -> None:
    """Leave a partial file behind, as a download that used up its retries."""
    site.faults.append(Fault(cut_after=cut_after))
    with pytest.raises(DownloadError, match=f"{cut_after} bytes are kept"):
        download(site, path, policy=RetryPolicy(retries=0))
    assert visible(path.parent) == {"file.zip.partial", "file.zip.partial.json"}


def test_a_file_arrives_with_its_progress(site: Site, path: Path):
    seen = []
    download_file(
        f"{site.url}/file.zip",
        path,
        checksum=md5(CONTENT),
        remedies=REMEDIES,
        size=len(CONTENT),
        on_progress=lambda *progress: seen.append(progress),
    )
    assert_complete(path)
    assert ("downloading file.zip", 50_000, 50_000) in seen
    assert seen[-1] == ("checking file.zip", 50_000, 50_000)


def test_an_empty_file_arrives(site: Site, path: Path):
    site.files["file.zip"] = b""
    download(site, path, b"")
    assert_complete(path, b"")


def test_a_dropped_connection_is_resumed_where_it_broke_off(site: Site, path: Path):
    site.faults = [Fault(cut_after=20_000), Fault(cut_after=10_000)]
    download(site, path)
    assert_complete(path)
    assert site.requested_ranges == [None, "bytes=20000-", "bytes=30000-"]
    assert site.bytes_sent == len(CONTENT)


@pytest.mark.parametrize("validators", [True, False])
def test_a_later_download_resumes(site: Site, path: Path, validators: bool):
    site.validators = validators
    interrupt(site, path)
    download(site, path)
    assert_complete(path)
    assert site.bytes_sent == len(CONTENT)


def test_attempts_that_receive_much_do_not_count_as_retries(site: Site, path: Path):
    content = site.files["file.zip"] = bytes(7 << 20)
    site.faults = [Fault(cut_after=1 << 20)] * 6
    download(site, path, content, RetryPolicy(retries=1, pause=0.001))
    assert_complete(path, content)
    assert site.bytes_sent == len(content)


def test_a_server_without_ranges_restarts(site: Site, path: Path, caplog: pytest.LogCaptureFixture):
    site.ranges = False
    interrupt(site, path)
    download(site, path)
    assert_complete(path)
    assert site.bytes_sent == 20_000 + len(CONTENT)
    assert "the server cannot resume downloads" in caplog.text


def test_a_changed_file_is_not_mixed_with_the_old_one(
    site: Site, path: Path, caplog: pytest.LogCaptureFixture
):
    interrupt(site, path)
    site.files["file.zip"] = OTHER
    download(site, path, OTHER)
    assert_complete(path, OTHER)
    assert "the server now has another version of the file" in caplog.text


@pytest.mark.parametrize("length", [40_000, 10_000])
def test_a_changed_length_is_noticed_without_validators(site: Site, path: Path, length: int):
    """The new file is longer or shorter than the partial one."""
    site.validators = False
    interrupt(site, path)
    site.files["file.zip"] = OTHER[:length]
    download(site, path, OTHER[:length])
    assert_complete(path, OTHER[:length])


def test_a_damaged_version_file_restarts(site: Site, path: Path):
    interrupt(site, path)
    (path.parent / "file.zip.partial.json").write_text('{"etag": ')
    download(site, path)
    assert_complete(path)
    assert site.requested_ranges == [None, None]


def test_a_complete_partial_file_needs_no_server(site: Site, path: Path):
    """The process was killed between the last byte and the rename."""
    interrupt(site, path)
    (path.parent / "file.zip.partial").write_bytes(CONTENT)
    download(site, path)
    assert_complete(path)
    assert len(site.requested_ranges) == 1


def test_a_server_without_content_length(site: Site, path: Path):
    site.lengths = False
    download(site, path)
    assert_complete(path)


@pytest.mark.parametrize("lengths", [True, False])
def test_wrong_checksum_leaves_nothing(site: Site, path: Path, lengths: bool):
    site.lengths = lengths
    site.faults = [Fault(cut_after=0 if lengths else 30_000)]
    site.files["file.zip"] = OTHER
    with pytest.raises(DownloadError, match=r"MD5 .*--checksums"):
        download(site, path)
    assert visible(path.parent) == set()


@pytest.mark.parametrize("algorithm", ["md5", "sha256"])
def test_the_first_digits_of_a_checksum_suffice(site: Site, path: Path, algorithm: str):
    digest = hashlib.new(algorithm, CONTENT).hexdigest()[:8]
    url = f"{site.url}/file.zip"
    wrong = Checksum(algorithm, "0" * 8)
    with pytest.raises(DownloadError, match=f"{digest} is not 00000000"):
        download_file(url, path, checksum=wrong, remedies=REMEDIES, policy=POLICY)
    right = Checksum(algorithm, digest)
    download_file(url, path, checksum=right, remedies=REMEDIES, policy=POLICY)
    assert_complete(path)


def test_another_size_is_refused_before_it_is_downloaded(site: Site, path: Path):
    site.always = Fault(silent_after=0)
    with pytest.raises(DownloadError, match=r"50000 bytes.* 60000"):
        download(site, path, size=60_000)
    assert visible(path.parent) == set()


@pytest.mark.parametrize("status", [403, 404])
def test_client_errors_are_not_retried(site: Site, path: Path, status: int):
    site.faults = [Fault(status=status)]
    with pytest.raises(DownloadError, match=rf"{status} .*--base-url"):
        download(site, path)
    assert len(site.requested_ranges) == 1


def test_server_errors_are_retried(site: Site, path: Path, caplog: pytest.LogCaptureFixture):
    site.faults = [Fault(status=500), Fault(status=503)]
    download(site, path)
    assert_complete(path)
    assert "503 Service Unavailable" in caplog.text


def test_retries_end(site: Site, path: Path):
    site.always = Fault(status=503)
    with pytest.raises(DownloadError, match="503 Service Unavailable"):
        download(site, path)
    assert len(site.requested_ranges) == 3


def test_a_silent_connection_is_replaced(site: Site, path: Path):
    site.faults = [Fault(silent_after=20_000)]
    download(site, path, policy=RetryPolicy(retries=1, pause=0.001, timeout=0.3))
    assert_complete(path)
    assert site.bytes_sent == len(CONTENT)


def test_slow_connections_end(site: Site, path: Path):
    site.always = Fault(trickle=True)
    with pytest.raises(DownloadError, match=r"\d+ bytes in \d+ s; \d+ bytes are kept"):
        download(site, path, policy=RetryPolicy(retries=1, pause=0.001, timeout=0.3))
    assert len(site.requested_ranges) == 2
    assert CONTENT.startswith((path.parent / "file.zip.partial").read_bytes())


def test_a_refused_connection_is_an_error(path: Path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(DownloadError, match=r"refused; .*--base-url"):
        download(Site({}, url=f"http://127.0.0.1:{port}"), path)


@pytest.mark.parametrize(
    ("variable", "value", "fact"),
    [
        ("ALL_PROXY", "socks5://127.0.0.1:1080", "SOCKS proxy"),
        ("HTTP_PROXY", "unknown://127.0.0.1:1080", "unknown://"),
        ("SSL_CERT_FILE", "/no/such/file", "No such file"),
    ],
)
def test_unusable_network_settings_are_named(
    site: Site, path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, fact: str
):
    monkeypatch.setitem(sys.modules, "socksio", None)  # not installed
    monkeypatch.setenv(variable, value)
    with pytest.raises(DownloadError, match=rf"{fact}.*{variable}"):
        download(site, path)


def test_a_file_that_does_not_fit_on_the_disk_is_refused(site: Site, path: Path):
    site.always = Fault(announced=10**17)
    with pytest.raises(DownloadError, match=r"needs 100000000\.0 GB more"):
        download(site, path)
    assert site.bytes_sent <= len(CONTENT)
    assert not path.exists()


def test_an_existing_file_is_not_downloaded_again(site: Site, path: Path):
    path.write_bytes(CONTENT)
    download(site, path)
    assert_complete(path)
    assert site.requested_ranges == []


def test_an_existing_file_needs_no_lock(site: Site, path: Path):
    """In a read-only folder, the lock cannot be written."""
    path.write_bytes(CONTENT)
    with exclusive_lock(path):
        download(site, path)
    assert_complete(path)


def test_an_existing_other_file_is_not_replaced(site: Site, path: Path):
    path.write_bytes(OTHER)
    with pytest.raises(DownloadError, match=r"MD5 .*delete it"):
        download(site, path)
    assert_complete(path, OTHER)


def test_a_file_has_one_writer(site: Site, path: Path):
    with exclusive_lock(path), pytest.raises(DownloadError, match="another process"):
        download(site, path)
    download(site, path)
    assert_complete(path)


def test_a_folder_that_is_not_writable_is_named(site: Site, path: Path):
    path.with_name(".file.zip.lock").mkdir()  # cannot be opened, even by root
    with pytest.raises(DownloadError, match=r"cannot create .*file\.zip: .*writable"):
        download(site, path)
    assert site.requested_ranges == []
