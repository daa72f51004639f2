"""The notebook `notebooks/first_model.ipynb`: its execution, and its stored outputs."""

import base64
import getpass
import json
import re
from io import BytesIO
from pathlib import Path

import nbformat
import pytest
from executed_notebook import execute
from PIL import Image

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "notebooks" / "first_model.ipynb"
# One input size instead of two, because the export of each takes six seconds. Garbage is collected
# less often, for speed.
STARTUP = """
import functools, gc
gc.set_threshold(50_000)
import maskrcnn_trt.export.bundle as m
m.bundle_from_checkpoint = functools.partial(m.bundle_from_checkpoint, buckets=[(192, 192)])
"""


def images_in(notebook: nbformat.NotebookNode) -> dict[str, Image.Image]:
    """Return the image that a cell shows, by the id of the cell."""
    return {
        cell.id: Image.open(BytesIO(base64.b64decode(output.data["image/png"])))
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", ())
    }


@pytest.mark.slow
def test_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    startup = tmp_path / "IPYTHONDIR" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    (startup / "one_size.py").write_text(STARTUP)
    work = tmp_path / "notebooks"
    work.mkdir()
    # Raises the error of a cell. One cell compares the detections of server and `Detector`.
    executed = execute(NOTEBOOK, work, ITERATIONS=3, TRAIN_IMAGES=8, VAL_IMAGES=8)
    assert images_in(executed).keys() == images_in(nbformat.read(NOTEBOOK, as_version=4)).keys()
    folder = tmp_path / "runs" / "first_model"
    assert len(list((folder / "data" / "train").iterdir())) == 8
    assert sorted(file.suffix for file in (folder / "bundle").iterdir()) == [".json", ".onnx"]
    entries = map(json.loads, (folder / "train" / "metrics.jsonl").read_text().splitlines())
    assert [e["iteration"] for e in entries if "segm/AP50" in e] == [1, 2, 3]
    assert list(work.iterdir()) == []
    (log,) = (cell.outputs for cell in executed.cells if cell.id == "train")
    assert {output.output_type for output in log} == {"stream"}
    text = "".join(output.text for output in log)
    assert "loss_mask" in text
    assert "\x1b" not in text


def test_stored_outputs_are_complete() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert "error" not in {output.output_type for output in outputs}
    images = images_in(notebook)
    assert len(images) >= 4
    for image in images.values():
        assert image.width >= 150
        assert len(set(image.convert("L").tobytes())) > 16
    assert NOTEBOOK.stat().st_size < 2**20


def test_stored_outputs_do_not_describe_a_machine() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    for cell in notebook.cells:
        assert cell.metadata.keys() <= {"tags"}
        for output in cell.get("outputs", ()):
            texts = [output.get("text", ""), output.get("data", {}).get("text/plain", "")]
            text = "\n".join(texts)
            assert not re.search(r"(?<![\w.])/\w+/|\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d,", text)
            assert not re.search(rf"\b{re.escape(getpass.getuser())}\b", text)
