"""Mirror of the model zoos' servers, with small weights files at the published paths."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from faulty_server import Site, serving

from maskrcnn_trt.model.weights.zoo import zoo_model


@contextmanager
def zoo_mirror(
    folder: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, bytes]
) -> Iterator[Site]:
    """Serve weights files by name of the published model, and make downloads use this server.

    The user's cache is in `folder`. The checksums in its file `SHA256SUMS` replace the published
    ones.
    """
    site = Site({zoo_model(name).path.lstrip("/"): content for name, content in files.items()})
    lines = (
        f"{hashlib.sha256(content).hexdigest()}  {zoo_model(name).file_name}\n"
        for name, content in files.items()
    )
    (folder / "SHA256SUMS").write_text("".join(lines))
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("MASKRCNN_ZOO_CHECKSUMS", str(folder / "SHA256SUMS"))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(site):
        monkeypatch.setenv("MASKRCNN_ZOO_MIRROR", site.url)
        yield site
