import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from maskrcnn_trt.export import commands
from maskrcnn_trt.model.bundle.manifest import BundleError, read_manifest
from maskrcnn_trt.model.weights import bundle_cache
from maskrcnn_trt.model.weights.bundle_cache import bundle_from_reference


def test_name_of_a_checkpoint_may_begin_with_a_dash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("-o.pth").touch()
    words: list[str] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        words.extend(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    bundle = bundle_from_reference("-o.pth", precisions=("fp16", "tf32"))
    arguments = words[words.index("export") + 1 :]
    parameters = commands.export.make_context("export", arguments).params
    assert (parameters["checkpoint"], parameters["bundle"]) == ("-o.pth", bundle)
    assert parameters["precisions"] == ("fp16", "tf32")


def test_another_base_configuration_gives_another_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(returncode=0))
    weights, base = tmp_path / "model.pth", tmp_path / "base.yaml"
    weights.touch()
    (tmp_path / "config.yaml").write_text("_BASE_: base.yaml")
    bundles = set()
    for content in ("INPUT: {MIN_SIZE_TEST: 320}", "INPUT: {MIN_SIZE_TEST: 640}", "_BASE_: ["):
        base.write_text(content)
        bundles.add(bundle_from_reference(weights))
    assert len(bundles) == 3


def test_cache_folder_that_cannot_be_created_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "model.pth"
    file.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    with pytest.raises(BundleError, match=r"model\.pth/.*XDG_CACHE_HOME"):
        bundle_from_reference(file)


def test_damaged_bundles_are_exported_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bundle: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    exports: list[Path] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        exports.append(Path(command[command.index("-o") + 1]))
        shutil.copytree(bundle, exports[-1], dirs_exist_ok=True)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    weights = tmp_path / "model.pth"
    weights.touch()
    artifact = bundle_from_reference(weights) / read_manifest(bundle).artifacts[-1].path
    content = artifact.read_bytes()
    artifact.write_bytes(content[:-100])
    bundle_from_reference(weights)
    assert artifact.read_bytes() == content
    artifact.unlink()
    bundle_from_reference(weights)
    assert artifact.read_bytes() == content
    bundle_from_reference(weights)  # the bundle is intact
    assert len(exports) == 3


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_during_the_export_also_ends_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint, started = tmp_path / "model.pth", tmp_path / "started"
    checkpoint.touch()
    script = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    monkeypatch.setattr(bundle_cache, "module_command", lambda _: [sys.executable, "-c", script])

    def send_signal() -> None:
        while not (started.exists() and started.read_text()):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    handlers = {n: signal.signal(n, signal.SIG_DFL) for n in (signal.SIGTERM, signal.SIGHUP)}
    threading.Thread(target=send_signal, daemon=True).start()
    try:
        with pytest.raises(SystemExit) as error:
            bundle_from_reference(checkpoint)
    finally:
        for own, handler in handlers.items():
            signal.signal(own, handler)
    assert error.value.code == 128 + number
    assert not Path("/proc", started.read_text()).exists()
