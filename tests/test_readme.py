"""Commands and links of all pages."""

import re
import shlex
import subprocess
from pathlib import Path

import click
import pytest

from maskrcnn_trt.cli import cli

ROOT = Path(__file__).parents[1]
PAGES = {
    name: (ROOT / name).read_text()
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()
    # Records keep the commands of the version that was measured.
    if (ROOT / name).exists() and not re.search(r"benchmarks/results/.+-\d{6}\.md$", name)
}  # fmt: skip
COMMANDS = sorted(
    {
        line
        for text in PAGES.values()
        for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for line in re.findall(r"^maskrcnn (.+)$", block.replace("\\\n", ""), re.MULTILINE)
    }
)
LINKS = sorted(
    {
        (page, link)
        for page, text in PAGES.items()
        for link in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", text)
    }
)


@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_valid(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Parse the words after creating empty files and folders for the paths among them."""
    words = [word for word in shlex.split(line, comments=True) if word != "..."]
    monkeypatch.chdir(tmp_path)
    paths = [Path(word) for word in words if re.search(r"[/.]|^bundle$", word)]
    for path in paths:
        if not path.is_absolute() and not path.exists():
            (path.parent if path.suffix else path).mkdir(parents=True, exist_ok=True)
            if path.suffix:
                path.touch()
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        name = words.pop(0)
        subcommand = command.get_command(context, name)
        assert subcommand is not None, name
        command, context = subcommand, click.Context(subcommand, parent=context, info_name=name)
    command.parse_args(context, words)


def test_pages_show_every_command():
    shown = {line.split()[0] for line in COMMANDS}
    assert shown | {"quickstart"} == set(cli.list_commands(click.Context(cli)))


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_link_target_exists(page: str, link: str):
    target, _, anchor = link.partition("#")
    path = (ROOT / page).parent / target if target else ROOT / page
    assert path.exists()
    if anchor:
        assert anchor in anchors_of(path.read_text())


def anchors_of(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
