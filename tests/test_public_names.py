import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import maskrcnn_trt
from maskrcnn_trt.training.run import evaluate_checkpoint

ROOT = Path(maskrcnn_trt.__file__).parent


def test_public_names_are_those_of_the_stub_and_the_page() -> None:
    stub = ast.parse((ROOT / "__init__.pyi").read_text())
    sources = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sources.keys() == set(maskrcnn_trt.__all__)
    page = (ROOT / "docs" / "api.md").read_text()
    for name, source in sources.items():
        module, _, attribute = source.rpartition(".")
        defined = getattr(importlib.import_module(f"maskrcnn_trt.{module}"), attribute)
        assert getattr(maskrcnn_trt, name) is defined
        assert f"maskrcnn_trt.{name}(" in page
        assert f"\n::: maskrcnn_trt.{source}\n" in page


def test_the_page_has_the_errors_of_training() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    for function in (maskrcnn_trt.train, evaluate_checkpoint):
        _, _, raises = (function.__doc__ or "").partition("Raises:")
        errors = re.findall(r"^ {8}(\w+):", raises, re.MULTILINE)
        assert errors
        for error in errors:
            assert f".{error}\n" in page


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="Detectors"):
        maskrcnn_trt.Detectors  # noqa: B018
    assert {"Detector", "__version__"} <= set(dir(maskrcnn_trt))


def test_the_import_is_light() -> None:
    code = "import sys, maskrcnn_trt; print(len(sys.modules))"
    counts = [
        int(subprocess.run([sys.executable, "-c", c], check=True, capture_output=True).stdout)
        for c in (code, "import sys; print(len(sys.modules))")
    ]
    assert counts[0] - counts[1] < 20
