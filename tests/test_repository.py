"""Consistency of requirements.lock with pyproject.toml, and of generated code with its source."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LOCK = (ROOT / "requirements.lock").read_text()
PINS = {
    canonicalize_name(name): version
    for name, version in re.findall(r"^([\w.-]+)==(\S+)", LOCK, re.MULTILINE)
}


def requirements_of_project() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    base = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    return [Requirement(text) for text in (*base, *extras["cpu"], *extras["train"], *extras["dev"])]


@pytest.mark.parametrize("requirement", requirements_of_project(), ids=str)
def test_lock_satisfies_the_requirements(requirement: Requirement):
    assert requirement.specifier.contains(PINS[canonicalize_name(requirement.name)])


def test_lock_is_closed():
    """Check that the lock pins the requirements of each installed pin."""
    for name in PINS:
        try:
            requirements = metadata.requires(name) or ()
        except metadata.PackageNotFoundError:  # a pin for another platform or Python
            continue
        for requirement in map(Requirement, requirements):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pin = PINS[canonicalize_name(requirement.name)]
                assert requirement.specifier.contains(pin, prereleases=True), (name, requirement)


def test_lock_has_hashes_but_no_addresses():
    for block in re.split(r"^(?=[\w.-]+==)", LOCK, flags=re.MULTILINE)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", block), block
    assert not re.search(r"://|--(extra-)?index|--find-links|@", LOCK)


@pytest.mark.parametrize(
    ("source", "kinds"),
    [
        ("protos/maskrcnn/v1/detector.proto", ["python_out", "pyi_out", "grpc_python_out"]),
        # Without Python code: our module reads the descriptors.
        ("protos/inference/open_inference.proto", ["pyi_out", "grpc_python_out"]),
    ],
)
def test_generated_code_is_current(tmp_path: Path, source: str, kinds: list[str]):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "maskrcnn_trt").symlink_to(ROOT)
    path = Path("maskrcnn_trt", source)
    outputs = [f"--{kind}={tmp_path}" for kind in kinds]
    if "python_out" not in kinds:
        outputs.append(f"--descriptor_set_out={tmp_path / path.with_suffix('.binpb')}")
        (tmp_path / path).parent.mkdir(parents=True)
    protoc = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={tmp_path / 'in'}"]
    subprocess.run([*protoc, *outputs, str(path)], check=True, timeout=60)
    generated = sorted((tmp_path / path).parent.iterdir())
    assert len(generated) == 3
    for made in generated:
        committed = (ROOT / source).parent / made.name
        assert made.read_bytes() == committed.read_bytes(), "run `make protos`"
