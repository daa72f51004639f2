"""Checks of `make dist`: versions, and contents of wheel and sdist."""

import io
import tarfile
import zipfile
from pathlib import Path

import pytest
from check_release import ReleaseError, check_contents, checked_version, interpreters

RELEASED = "# Changelog\n\n## [0.2.0] - 2030-01-31\n\n- A\n\n## [0.1.0] - 2030-01-01\n"
UNRELEASED = "# Changelog\n\n## [Unreleased]\n\n- B\n\n## [0.1.0] - 2030-01-01\n"


def repository(folder: Path, changelog: str, version: str, attribute: str) -> Path:
    (folder / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
    (folder / "__init__.py").write_text(f'"""Package."""\n\n__version__ = "{attribute}"\n')
    (folder / "CHANGELOG.md").write_text(changelog)
    return folder


@pytest.mark.parametrize(
    ("changelog", "tags"),
    [(RELEASED, []), (RELEASED, ["v0.2.0"]), (RELEASED, ["nightly"]), (UNRELEASED, [])],
)
def test_matching_versions_are_accepted(tmp_path: Path, changelog: str, tags: list[str]):
    assert checked_version(repository(tmp_path, changelog, "0.2.0", "0.2.0"), tags) == "0.2.0"


@pytest.mark.parametrize(
    ("changelog", "version", "attribute", "tags", "word"),
    [
        (RELEASED, "0.2.0", "0.3.0", [], "__init__.py"),
        (RELEASED, "0.3.0", "0.3.0", [], "0.3.0"),
        (RELEASED, "0.2.0", "0.2.0", ["v0.1.0"], "v0.2.0"),
        (RELEASED.replace(" - 2030-01-31", ""), "0.2.0", "0.2.0", [], "0.2.0"),
        (UNRELEASED, "0.1.0", "0.1.0", [], "raise"),
        (UNRELEASED, "0.2.0", "0.2.0", ["v0.2.0"], "Unreleased"),
        ("# Changelog\n", "0.2.0", "0.2.0", [], "CHANGELOG.md"),
    ],
)
def test_contradicting_versions_are_rejected(
    tmp_path: Path, changelog: str, version: str, attribute: str, tags: list[str], word: str
):
    with pytest.raises(ReleaseError, match=word):
        checked_version(repository(tmp_path, changelog, version, attribute), tags)


@pytest.mark.parametrize(
    ("in_wheel", "in_sdist", "word"),
    [
        (["a.py", "a.cu"], ["a.py", "a.cu", "PKG-INFO"], None),
        (["a.py"], ["a.py", "a.cu"], "whl lacks.*a.cu"),
        (["a.py", "a.cu"], ["a.py"], "gz lacks.*a.cu"),
        (["a.py", "a.cu", "tests/b.py"], ["a.py", "a.cu"], "b.py"),
    ],
)
def test_files_of_wheel_and_sdist_are_compared_with_the_package(
    tmp_path: Path, in_wheel: list[str], in_sdist: list[str], word: str | None
):
    wheel, sdist = tmp_path / "a.whl", tmp_path / "a.tar.gz"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in in_wheel:
            archive.writestr(f"maskrcnn_trt/{name}", "")
        archive.writestr("a-1.dist-info/METADATA", "")
    with tarfile.open(sdist, "w:gz") as source:
        for name in in_sdist:
            source.addfile(tarfile.TarInfo(f"a-1/{name}"), io.BytesIO())
    expected = {"maskrcnn_trt/a.py", "maskrcnn_trt/a.cu"}
    if word is None:
        check_contents(wheel, sdist, expected)
    else:
        with pytest.raises(ReleaseError, match=word):
            check_contents(wheel, sdist, expected)


def test_only_supported_interpreters_are_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name, script in {
        "python3.10": "echo 3.10",
        "python3.12": "exit 127",  # as a shim of pyenv does
        "python3.13": "echo 3.13",
        "python3.13-config": "echo 3.13",
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert interpreters() == {"3.13": tmp_path / "python3.13"}
