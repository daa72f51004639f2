"""Runs of the `maskrcnn` command line within the test process."""

import sys

import pytest

from maskrcnn_trt import cli


def run_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> tuple[object, str, str]:
    """Return exit code, standard output and standard error of a command line."""
    monkeypatch.setattr(sys, "argv", ["maskrcnn", *args])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code, *capsys.readouterr()
