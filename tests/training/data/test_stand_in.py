"""Training without a data set of one's own."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from click.testing import CliRunner
from tiny_run import load_tiny

from maskrcnn_trt.cli import cli
from maskrcnn_trt.model.checkpoint import load_checkpoint
from maskrcnn_trt.training.data.coco import CocoDataset
from maskrcnn_trt.training.data.stand_in import with_synthetic_data


def test_pictures_are_drawn_once(tiny_config: Path, tmp_path: Path) -> None:
    config = load_tiny(tiny_config, tmp_path)
    # What a process that was killed while drawing leaves behind.
    left = tmp_path / ".synthetic-96x64.partial" / "train" / "000000.jpg"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half a pic")
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(with_synthetic_data, (config, config))
    assert first == second
    assert first.data.val is not None
    for data in (first.data.train, first.data.val):
        records = CocoDataset(data, "refuse").records
        assert {frozenset((r.height, r.width)) for r in records} == {frozenset((64, 96))}
    assert first.model_copy(update={"data": config.data}) == config
    picture = first.data.train.images / "000000.jpg"
    drawn = picture.stat().st_mtime_ns
    assert with_synthetic_data(load_tiny(tiny_config, tmp_path, "data.val=null")).data.val is None
    assert picture.stat().st_mtime_ns == drawn


def test_training_needs_no_data_set(tiny_config: Path, tmp_path: Path) -> None:
    overrides = (
        f"output_dir={tmp_path}",
        "data.train={images: none, annotations: none}",
        "solver.max_iterations=1",
    )
    arguments = ("train", "--use-synthetic-data", str(tiny_config), *overrides)
    result = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert len(load_checkpoint(tmp_path / "model_final.pth").categories) > 1
