"""Execution of notebooks. As a command, execute the notebooks given and store their outputs."""

import re
import sys
from base64 import b64decode, b64encode
from io import BytesIO
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

# Time and level at the start of a log line.
_LOG_PREFIX = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ [A-Z]+ ", re.MULTILINE)
_MAX_WIDTH = 1000
_CELL_LIMIT_S = 3600


def execute(path: Path, folder: Path, **parameters: Any) -> nbformat.NotebookNode:
    """Execute a notebook, and return it with its outputs. The file is not changed.

    Args:
        path: Notebook.
        folder: Working directory of the kernel.
        **parameters: Variables to set after the cell with the tag `parameters`.

    Raises:
        CellExecutionError: A cell raised an exception.
    """
    notebook = nbformat.read(path, as_version=4)
    if parameters:
        tagged = ["parameters" in cell.metadata.get("tags", ()) for cell in notebook.cells]
        assignments = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
        notebook.cells.insert(tagged.index(True) + 1, nbformat.v4.new_code_cell(assignments))
    client = NotebookClient(
        notebook,
        timeout=_CELL_LIMIT_S,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    return client.execute()


def shrink_outputs(notebook: nbformat.NotebookNode) -> None:
    """Remove time and level from log lines, join a cell's texts by stream, and shrink images."""
    for cell in notebook.cells:
        texts: dict[str, Any] = {}
        kept = []
        for output in cell.get("outputs", ()):
            if output.output_type == "stream" and output.name in texts:
                texts[output.name].text += output.text
                continue
            if output.output_type == "stream":
                texts[output.name] = output
            elif "image/png" in output.get("data", ()):
                output.data["image/png"] = _small_png(output.data["image/png"])
            kept.append(output)
        for output in texts.values():
            output.text = _LOG_PREFIX.sub("", output.text)
        if "outputs" in cell:
            cell.outputs = kept


def _small_png(encoded: str) -> str:
    """Return a base64 PNG of at most `_MAX_WIDTH` pixels in width, with 256 colours."""
    image = Image.open(BytesIO(b64decode(encoded))).convert("RGB")
    image.thumbnail((_MAX_WIDTH, image.height))
    file = BytesIO()
    image.quantize().save(file, "PNG", optimize=True)
    return b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    for name in sys.argv[1:]:
        executed = execute(Path(name), Path(name).parent)
        shrink_outputs(executed)
        nbformat.write(executed, name)
