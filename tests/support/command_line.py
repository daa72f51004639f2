"""Runs of the `maskrcnn` command line within the test process."""

import sys

import click
import pytest
from click.testing import CliRunner, Result

from maskrcnn_trt import cli


def invoke(command: click.Command, *words: object) -> Result:
    """Run a click command with the arguments `words`, converted to strings."""
    return CliRunner().invoke(command, [str(word) for word in words])


def run_main(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str
) -> tuple[object, str, str]:
    """Run `maskrcnn` with arguments. Return exit code, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["maskrcnn", *args])
    with pytest.raises(SystemExit) as end:
        cli.main()
    return end.value.code, *capsys.readouterr()
