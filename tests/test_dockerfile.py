"""Shell commands and arguments of the Dockerfile, run as far as that is possible without Docker."""

import json
import os
import re
import subprocess
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from maskrcnn_trt.serving.commands.serve import serve

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def match(pattern: str) -> str:
    """Return the first group of the only match in the Dockerfile."""
    (text,) = re.findall(pattern, DOCKERFILE, re.M | re.S)
    return str(text)


def shell(command: str, folder: Path, *stubs: str, **variables: str) -> str:
    """Run a command with stub programs that print their arguments, and return the output."""
    for stub in stubs:
        path = folder / stub
        path.write_text(f'#!/bin/sh\necho {stub} "$@"\n')
        path.chmod(0o755)
    environment = {"PATH": f"{folder}:{os.environ['PATH']}", **variables}
    return subprocess.run(
        ["sh", "-c", command], cwd=folder, env=environment, stdout=subprocess.PIPE, check=True,
        text=True,
    ).stdout  # fmt: skip


@pytest.mark.parametrize("extra", ["cpu", "torch", "tracing", "train"])
def test_lock_constrains_the_extras(extra: str, tmp_path: Path) -> None:
    (tmp_path / "requirements.lock").write_text((ROOT / "requirements.lock").read_text())
    shell(match(r"^RUN (sed [^\n]* requirements\.lock > constraints\.txt)"), tmp_path)
    lines = (tmp_path / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if line and not line.lstrip().startswith("#")]
    versions = {canonicalize_name(pin.name): str(pin.specifier) for pin in pins}
    for requirement in map(Requirement, EXTRAS[extra]):
        pin = versions[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(pin.removeprefix("==")), requirement


@pytest.mark.parametrize(
    ("extras", "project", "with_compiler"),
    [
        (match(r"^ARG EXTRAS=(\S+)"), ".[cpu]", False),
        ("torch", ".[torch]", True),
        ("tracing,torch", ".[tracing,torch]", True),
    ],
)
def test_build_argument_selects_the_extras(
    extras: str, project: str, with_compiler: bool, tmp_path: Path
) -> None:
    install = match(r"^RUN (pip [^\n]*install [^\n]*EXTRAS[^\n]*)")
    assert shell(install, tmp_path, "pip", EXTRAS=extras).split()[-1] == project
    # Torch compiles C code at run time.
    packages = match(r"^RUN (case [^\n]*EXTRAS.*?esac)")
    assert ("gcc" in shell(packages, tmp_path, "apt-get", "rm", EXTRAS=extras)) == with_compiler
    assert {*filter(None, extras.split(","))} <= EXTRAS.keys()


@pytest.mark.parametrize(("extras", "is_built"), [("cpu,http", False), ("tensorrt,pycuda", True)])
def test_wheel_of_pycuda_is_built_if_needed(extras: str, is_built: bool, tmp_path: Path) -> None:
    stubs = ("mkdir", "apt-get", "pip", "gcc")
    build = match(r"^RUN (mkdir /wheels.*?esac)")
    output = shell(build, tmp_path, *stubs, EXTRAS=extras, HOME=str(tmp_path))
    (floor,) = EXTRAS["pycuda"]
    assert (f"pip wheel --no-cache-dir --no-deps --wheel-dir /wheels {floor}" in output) == is_built
    assert ("apt-get" in output) == is_built


def test_image_starts_the_server_with_known_options() -> None:
    verb, _, *options = json.loads(match(r'^CMD (\["serve".*?\])$'))
    assert verb == serve.name
    assert {*options[::2]} <= {name for option in serve.params for name in option.opts}
    (script,) = metadata.entry_points(group="console_scripts", name="maskrcnn")
    assert json.loads(match(r"^ENTRYPOINT (\[.*?\])$")) == [script.name]
