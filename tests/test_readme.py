"""The README's commands and links are real."""

import re
import shlex
from pathlib import Path

import click
import pytest

from maskrcnn_trt.cli import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
COMMANDS = re.findall(r"^maskrcnn (.+)$", README.replace("\\\n", ""), re.MULTILINE)


@pytest.mark.parametrize("line", COMMANDS)
def test_command_line_is_understood(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The words are parsed as if they were typed, and the paths among them were there."""
    words = [word for word in shlex.split(line) if word != "..."]
    monkeypatch.chdir(tmp_path)
    for path in (Path(word) for word in words if "/" in word):
        (path.parent if path.suffix else path).mkdir(parents=True, exist_ok=True)
        if path.suffix:
            path.touch()
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        name = words.pop(0)
        found = command.get_command(context, name)
        assert found is not None, name
        command, context = found, click.Context(found, parent=context, info_name=name)
    command.parse_args(context, words)


def test_every_verb_is_shown():
    shown = {line.split()[0] for line in COMMANDS}
    assert shown | {"quickstart"} == set(cli.list_commands(click.Context(cli)))


@pytest.mark.parametrize("target", re.findall(r"\]\((?!http)([^)]+)\)", README))
def test_link_leads_somewhere(target: str):
    assert (ROOT / target).exists()
