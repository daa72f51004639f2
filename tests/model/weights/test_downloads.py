"""Downloads of published models and of URLs from a real server."""

import hashlib
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from faulty_server import Fault, Site
from zoo_mirror import zoo_mirror

from maskrcnn_trt.model.download.local_files import DownloadError
from maskrcnn_trt.model.weights.downloads import weights_path
from maskrcnn_trt.model.weights.zoo import zoo_model

NAME = "detectron2:mask_rcnn_R_50_FPN_3x"
URL = zoo_model(NAME).url
CONTENT = np.random.default_rng(0).bytes(50_000)


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    with zoo_mirror(tmp_path, monkeypatch, {NAME: CONTENT}) as site:
        yield site


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Documented path of the file in the cache."""
    return tmp_path / "cache" / "maskrcnn-trt" / "weights" / "model_final_f10217.pkl"


def test_a_published_file_is_downloaded_once(
    mirror: Site, path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for _ in range(2):
        assert weights_path(NAME) == path
    assert path.read_bytes() == CONTENT
    assert len(mirror.requested_ranges) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "CC BY-SA 3.0" in err
    assert f"{mirror.url}/detectron2/COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_3x/" in err


def test_urls_are_downloaded_once(mirror: Site) -> None:
    name = f"R-50-{hashlib.sha256(CONTENT).hexdigest()[:8]}.pkl"
    mirror.files[f"{name}?download=1"] = CONTENT
    for _ in range(2):
        path = weights_path(f"{mirror.url}/{name}?download=1")
        assert (path.name, path.read_bytes()) == (name, CONTENT)
    assert len(mirror.requested_ranges) == 1


def test_urls_with_the_same_file_name_are_kept_apart(mirror: Site) -> None:
    for folder in ("first", "second"):
        mirror.files[f"{folder}/model_final.pkl"] = folder.encode()
        path = weights_path(f"{mirror.url}/{folder}/model_final.pkl")
        assert path.read_bytes() == folder.encode()


def test_an_earlier_download_that_cannot_be_checked_is_named(
    mirror: Site, capfd: pytest.CaptureFixture[str]
) -> None:
    mirror.files["latest/model_final.pkl"] = CONTENT
    path = weights_path(f"{mirror.url}/latest/model_final.pkl")
    assert "delete it" not in capfd.readouterr().err
    assert weights_path(f"{mirror.url}/latest/model_final.pkl") == path
    assert f"using {path}, an earlier download of {mirror.url}" in capfd.readouterr().err


def test_failed_downloads_of_urls_leave_no_file(mirror: Site, path: Path) -> None:
    mirror.files["R-50-0123abcd.pkl"] = b"another file"
    for name, reason in {"R-50-0123abcd.pkl": "SHA-256", "none.pkl": "404"}.items():
        with pytest.raises(DownloadError, match=f"{name}.*{reason}"):
            weights_path(f"{mirror.url}/{name}")
    assert all(file.suffix == ".lock" for file in path.parent.iterdir())


@pytest.mark.usefixtures("mirror")
@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://[::1/x.pth", " is not a valid URL "),
        ("http://a..b/x.pth", ": encoding with"),
        ("https:///x.pth", ": Request URL is missing"),
    ],
)
def test_invalid_urls_are_named(
    url: str, reason: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(DownloadError, match=re.escape(url + reason)) as caught:
        weights_path(url.replace("//", "//me:secret@"))
    assert "secret" not in f"{caught.value}{caplog.text}{capfd.readouterr().err}"
    assert "trying again" not in caplog.text


def test_a_date_in_a_url_is_not_a_checksum(mirror: Site) -> None:
    mirror.files["model-20260131.pkl"] = CONTENT
    assert weights_path(f"{mirror.url}/model-20260131.pkl").read_bytes() == CONTENT


def test_an_interrupted_download_is_resumed(mirror: Site, path: Path) -> None:
    mirror.faults = [Fault(cut_after=20_000)]
    assert weights_path(NAME).read_bytes() == CONTENT
    assert mirror.requested_ranges == [None, "bytes=20000-"]


def test_the_published_checksum_applies_to_mirrors(
    mirror: Site, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASKRCNN_ZOO_CHECKSUMS")
    digits = hashlib.md5(CONTENT).hexdigest()[:6]
    with pytest.raises(DownloadError, match=f"MD5 {digits} is not f10217") as caught:
        weights_path(NAME)
    for fact in (URL, str(path), "MASKRCNN_ZOO_CHECKSUMS"):
        assert fact in str(caught.value)
    assert not path.exists()


@pytest.mark.parametrize("status", [403, 404])
def test_a_missing_file_is_reported_with_the_manual_download(
    mirror: Site, path: Path, status: int
) -> None:
    mirror.always = Fault(status=status)
    with pytest.raises(DownloadError, match=str(status)) as caught:
        weights_path(NAME)
    for fact in (URL, str(path), "MASKRCNN_ZOO_MIRROR"):
        assert fact in str(caught.value)


@pytest.mark.slow
def test_without_a_network_the_manual_download_is_named(
    tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MASKRCNN_ZOO_MIRROR", f"http://127.0.0.1:{port}")
    with pytest.raises(DownloadError, match="refused") as caught:
        weights_path(NAME)
    assert f"download {URL} yourself and save it as {path}" in str(caught.value)


def test_a_file_saved_by_hand_needs_no_server(mirror: Site, path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert weights_path(NAME) == path
    assert mirror.requested_ranges == []
    path.write_bytes(CONTENT[:-1])
    with pytest.raises(DownloadError, match=r"is not the published file.* delete it"):
        weights_path(NAME)


@pytest.mark.parametrize(
    ("variable", "value", "fact"),
    [
        ("MASKRCNN_ZOO_MIRROR", "localhost:8000", "http://"),
        ("MASKRCNN_ZOO_CHECKSUMS", "/no/such/file", "/no/such/file"),
        ("MASKRCNN_ZOO_CHECKSUMS", "{folder}/bad", "md5sum"),
    ],
)
def test_invalid_variables_are_named(
    mirror: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    variable: str, value: str, fact: str,
) -> None:  # fmt: skip
    (tmp_path / "bad").write_text("0123  model.pkl\n")
    monkeypatch.setenv(variable, value.format(folder=tmp_path))
    with pytest.raises(DownloadError, match=rf"{variable}.*{re.escape(fact)}"):
        weights_path(NAME)
