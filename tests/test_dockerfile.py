"""The Dockerfile's own commands, run as far as that goes without an image."""

import os
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from maskrcnn_trt.serving.serve_command import serve

ROOT = Path(__file__).parents[1]
LINES = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text()).splitlines()
INSTRUCTIONS = [line.partition(" ")[::2] for line in LINES if line and not line.startswith("#")]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def stages() -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, with those of the stages that it begins with."""
    found: dict[str, list[tuple[str, str]]] = {}
    for instruction, words in INSTRUCTIONS:
        if instruction == "FROM":
            base, _, name = words.split()
            own = found[name] = [*found.get(base, ())]
        else:
            own.append((instruction, words))
    return found


def runs(stage: str, word: str) -> str:
    """The command of a stage with a word in it."""
    (command,) = (words for name, words in stages()[stage] if name == "RUN" and word in words)
    return command


def shell(command: str, folder: Path, *tools: str, **variables: str) -> str:
    """What a command prints where tools only say how they are called."""
    for tool in tools:
        path = folder / tool
        path.write_text(f'#!/bin/sh\necho {tool} "$@"\n')
        path.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    run = ["sh", "-c", command]
    return subprocess.run(
        run, cwd=folder, env=environment, capture_output=True, text=True, check=True
    ).stdout


def test_stages_take_from_those_before() -> None:
    known: set[str] = set()
    for instruction, words in INSTRUCTIONS:
        if instruction == "FROM":
            base, name = words.split()[::2]
            assert base in known or ":" in base
            known.add(name)
        elif match := re.match(r"--from=(\S+)", words):
            assert match[1] in known


@pytest.mark.parametrize("extra", ["torch", "tracing", "train"])
def test_the_lock_constrains_what_images_install(extra: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.lock").write_text((ROOT / "requirements.lock").read_text())
    shell(runs("source", "requirements.lock").partition("&&")[0], tmp_path)
    lines = (tmp_path / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.lstrip().startswith("#")]
    versions = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}
    for wanted in map(Requirement, EXTRAS[extra]):
        pin = versions[canonicalize_name(wanted.name)]
        assert wanted.specifier.contains(pin.removeprefix("==")), wanted


@pytest.mark.parametrize(
    ("extras", "project", "with_compiler"),
    [("", ".", False), ("torch", ".[torch]", True), ("tracing,torch", ".[tracing,torch]", True)],
)
def test_extras_are_installed_by_name(
    extras: str, project: str, with_compiler: bool, tmp_path: Path
) -> None:
    assert ("ARG", "EXTRAS") in stages()["serving-install"]
    assert ("ARG", "EXTRAS") in stages()["serving"]
    install = runs("serving-install", "pip install").replace("/opt/maskrcnn/bin/", "")
    assert shell(install, tmp_path, "pip", EXTRAS=extras).split()[-1] == project
    tools = shell(runs("serving", "apt-get"), tmp_path, "apt-get", "rm", EXTRAS=extras)
    assert ("gcc" in tools) == with_compiler
    for extra in filter(None, extras.split(",")):
        assert extra in EXTRAS


def test_what_compiles_has_the_same_compiler(tmp_path: Path) -> None:
    serving, training = (
        shell(runs(stage, "apt-get"), tmp_path, "apt-get", "rm", EXTRAS="torch")
        for stage in ("serving", "training")
    )
    assert training == serving
    assert "gcc" in training


def test_servers_are_started_with_words_that_they_know() -> None:
    (command,) = (words for name, words in stages()["serving"] if name == "CMD")
    (entry,) = (words for name, words in stages()["serving"] if name == "ENTRYPOINT")
    verb, _, *options = re.findall(r'"([^"]+)"', command)
    assert verb == serve.name
    assert {*options[::2]} <= {name for option in serve.params for name in option.opts}
    (script,) = metadata.entry_points(group="console_scripts", name="maskrcnn")
    assert script.name in entry
