"""`maskrcnn quickstart` with few images, few iterations and short measurements."""

import json
import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from maskrcnn_trt.benchmarks import quickstart as package
from maskrcnn_trt.benchmarks.quickstart import QuickstartError, quickstart
from maskrcnn_trt.model.bundle.manifest import read_manifest, verified_path
from maskrcnn_trt.training import config


def test_folder_with_other_files_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    result = CliRunner().invoke(quickstart, ["-o", str(tmp_path)])
    assert isinstance(result.exception, QuickstartError)
    assert "-o" in str(result.exception)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_older_quickstart_is_removed_from_a_linked_and_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder"
    (tmp_path / "link").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    for name in ("folder", "link", "."):
        package._prepare_folder(Path(name))
        assert [path.name for path in folder.iterdir()] == [".quickstart"]
        (folder / "data").mkdir()
        (folder / "progress.png").symlink_to("data")
        monkeypatch.chdir(folder if name == "link" else tmp_path)


def test_output_folder_has_any_name(tmp_path: Path) -> None:
    folder = tmp_path / "it's: [1] #2"
    _, settings = package._configure(folder, 0, 16, None)
    assert settings.output_dir == folder / "train"
    assert settings.data.train.images == folder / "data" / "train"


@pytest.mark.slow
def test_all_steps_and_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "_BENCH_SECONDS", 1.5)
    # Predictions for one image instead of four are drawn three times.
    monkeypatch.setattr(package, "_DRAWN_IMAGES", 1)
    # One input size instead of two, because the export of each takes six seconds.
    load, size = config.load_config, "data.buckets=[[192, 192]]"
    monkeypatch.setattr(config, "load_config", lambda n, o: load(n, [*o, size]))
    folder = tmp_path / "quickstart"
    folder.mkdir()
    (folder / ".quickstart").touch()
    (folder / "old").touch()
    options = ["-o", str(folder), "--images", "8", "--iterations", "6"]
    result = CliRunner().invoke(quickstart, options)
    assert result.exit_code == 0, (result.output, result.exception)
    assert not (folder / "old").exists()
    metrics = json.loads((folder / "metrics.json").read_text())
    assert {"bbox/AP", "bbox/AP50", "segm/AP", "segm/AP50"} <= metrics.keys()
    assert "segm/AR100" in result.stdout
    assert metrics["infer/batch_8/images_per_second"] > 0
    assert metrics["serve/clients_8/p99_ms"] > 0
    for name in ("infer", "serve"):
        assert len(json.loads((folder / "bench" / f"{name}.json").read_text())["results"]) >= 2
    bundle = folder / "bundle"
    for artifact in read_manifest(bundle).artifacts:
        verified_path(bundle, artifact)
    samples = list((bundle / "samples").iterdir())
    assert samples
    for sample in samples:
        assert sample.read_bytes() == (folder / "data" / "val" / sample.name).read_bytes()
    for name in ("train/curves.png", "predictions.png", "progress.png"):
        with Image.open(folder / name) as image:
            assert image.width > 400
        assert str(folder / name) in result.stdout
    # Six iterations: after 10, 30 and 100 %.
    drawings = sorted(path.name for path in (folder / "train" / "validation_images").iterdir())
    assert drawings == ["0000001.png", "0000002.png", "0000006.png"]
    assert result.stdout.index("minutes on two") < result.stdout.index("1/7")
    commands = commands_in(result.stdout)
    assert ["serve", str(bundle), "--http-port", "8080"] in commands
    assert [words[0] for words in commands] == ["train", "serve", "predict"]


def commands_in(text: str) -> list[list[str]]:
    """Return the arguments of the commands in indented lines."""
    lines = re.findall(r"^  (\S*maskrcnn .+)$", text, re.MULTILINE)
    return [shlex.split(line)[1:] for line in lines]
