"""Commands and links of all pages."""

import pkgutil
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

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
BLOCKS = [
    pytest.param(block, id=f"{page}-{number}")
    for page, text in PAGES.items()
    for number, block in enumerate(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
]
# Programs of others. Their options are not checked.
OTHER_PROGRAMS = {
    "compute-sanitizer", "cp", "curl", "docker", "echo", "grpc_health_probe", "grpcurl", "kill",
    "kubectl", "ln", "mv", "nvidia-smi", "perf_analyzer", "pip", "printf", "torchrun", "xargs",
}  # fmt: skip


def simple_commands(block: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell block, without variables and redirections."""
    text = re.sub(r"(^|\s)#.*", "", block.replace("\\\n", ""), flags=re.MULTILINE)
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";|&<>\n")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t", True, ""
    words: list[str] = []
    for word in [*lexer, "\n"]:
        if not set(word) & set(";|&\n") or set(word) - set(";|&<>\n"):
            words.append(word)
            continue
        while words and re.match(r"[A-Z_]+=", words[0]):
            del words[0]
        if words:
            yield words[: words.index(">")] if ">" in words else words
        words = []


def own_arguments(words: list[str]) -> list[str] | None:
    """Return the arguments of `maskrcnn` in a command. None: it runs another program."""
    if words[0] == "torchrun" and "maskrcnn_trt" in words:
        return words[words.index("maskrcnn_trt") + 1 :]
    return words[1:] if words[0] == "maskrcnn" else None


ALL_COMMANDS = [words for block in BLOCKS for words in simple_commands(block.values[0])]
COMMANDS = sorted({shlex.join(own) for words in ALL_COMMANDS if (own := own_arguments(words))})
FOREIGN = sorted({shlex.join(words) for words in ALL_COMMANDS if own_arguments(words) is None})
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
    words = [word for word in shlex.split(line) if word != "..."]
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


@pytest.mark.parametrize("block", BLOCKS)
def test_shell_block_can_be_parsed(block: str):
    subprocess.run(["bash", "-n"], input=block, text=True, check=True)


@pytest.mark.parametrize("line", FOREIGN)
def test_program_and_its_files_exist(line: str):
    """Check targets of make, extras for pip, markers of pytest, and scripts of the repository."""
    program, *arguments = shlex.split(line)
    if program == "make":
        targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert {word for word in arguments if "=" not in word} <= targets
    elif program == "pip":
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for name, extras in re.findall(r"(\S+?)\[([\w,]+)\]", " ".join(arguments)):
            if name in (project["name"], "."):
                assert set(extras.split(",")) <= set(project["optional-dependencies"])
    elif program == "pytest":
        marker, *paths = arguments[arguments.index("-m") + 1 :]
        pytest_options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]
        assert any(m.startswith(f"{marker}:") for m in pytest_options["ini_options"]["markers"])
        assert all((ROOT / path).exists() for path in paths)
    elif program == ".venv/bin/python":
        assert (ROOT / arguments[0]).exists()
    else:
        assert program in OTHER_PROGRAMS
        folders = tuple(f"{folder.name}/" for folder in ROOT.iterdir() if folder.is_dir())
        assert all((ROOT / word).exists() for word in arguments if word.startswith(folders))


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


def test_site_has_every_page():
    class Loader(yaml.SafeLoader):
        """Reads the calls of Python functions in mkdocs.yml as mappings."""

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, _, node: None)
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)["nav"]
    pages = set(re.findall(r"[\w./-]+\.md", str(nav)))
    assert pages == set(PAGES) - {".github/pull_request_template.md"}


def test_names_on_the_api_page_exist():
    for name in re.findall(r"^::: (\S+)$", PAGES["docs/api.md"], re.MULTILINE):
        pkgutil.resolve_name(name)


def anchors_of(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
