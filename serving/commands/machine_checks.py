"""Helpers of `doctor` and `serve --doctor`.

They check this machine, and represent and print the results of checks.
"""

import platform
from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..backends.onnxruntime_packages import check_onnxruntime
from ..errors import BackendError
from ..host import gpu_names, installed_versions

_DISTRIBUTIONS: Final = (
    "maskrcnn-trt",
    "grpcio",
    "protobuf",
    "numpy",
    "pillow",
    "onnxruntime",
    "onnxruntime-gpu",
    "torch",
    "tensorrt",
    "tensorrt-rtx",
    "pycuda",
)

State = Literal["ok", "note", "warning", "fault"]

_STYLES: Final[Mapping[State, str]] = {
    "ok": "green",
    "note": "dim",
    "warning": "yellow",
    "fault": "bold red",
}


class CheckResult(NamedTuple):
    """Result of one check: the item checked and its outcome."""

    subject: str
    text: str
    # "fault": the server would not start, or clients would reject it.
    state: State = "ok"


class CheckSection(NamedTuple):
    """Results of related checks, under a title."""

    title: str
    results: list[CheckResult]

    @property
    def is_healthy(self) -> bool:
        """Whether no check found a fault."""
        return all(result.state != "fault" for result in self.results)


def machine_section() -> CheckSection:
    """Return the package versions and GPUs of this machine, and problems with ONNX Runtime."""
    versions = {"Python": platform.python_version(), **installed_versions(_DISTRIBUTIONS)}
    gpus = gpu_names() or ("nvidia-smi reports none",)
    results = [
        *(CheckResult(name, version) for name, version in versions.items()),
        *(CheckResult("GPU", gpu) for gpu in gpus),
        *_onnxruntime_results(),
    ]
    return CheckSection("Machine", results)


def show(sections: Iterable[CheckSection]) -> bool:
    """Print each section as it arrives. Return True if no check found a fault."""
    healthy = True
    for section in sections:
        table = Table(title=section.title, title_justify="left", box=SIMPLE_HEAD, show_header=False)
        for result in section.results:
            state = Text(result.state, _STYLES[result.state])
            table.add_row(state, Text(result.subject), Text(result.text))
        Console(markup=False, emoji=False).print(table)
        healthy = healthy and section.is_healthy
    return healthy


def _onnxruntime_results() -> list[CheckResult]:
    try:
        problem = check_onnxruntime()
    except BackendError as error:  # a note, because other backends run without ONNX Runtime
        return [CheckResult("ONNX Runtime", str(error), "note")]
    return [CheckResult("ONNX Runtime", problem, "warning")] if problem else []
