"""Build the wheel and the sdist of the current commit in dist/, check them, and try the wheel.

Usage: check_release.py. The wheel is installed without extras into a new environment of each Python
from 3.11 on that is found. The exit code is 1 if a check fails.
"""

import ast
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
_OLDEST = (3, 11)
# Pages, records and manifests for deployment stay in the repository.
_NOT_INSTALLED = re.compile(r"\.md$|^(benchmarks/results|serving/deploy)/")
# Heading of a version in CHANGELOG.md, with the date if it is released.
_SECTION = re.compile(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", re.MULTILINE)


class ReleaseError(Exception):
    """A file of the release is wrong, or two of them contradict each other."""


def checked_version(root: Path, tags: Iterable[str] = ()) -> str:
    """Return the version, which must be the same in all files that name it.

    Args:
        root: folder of `pyproject.toml`, `__init__.py` and `CHANGELOG.md`.
        tags: git tags of the commit. A tag `v1.2.3` makes the commit a release.

    Raises:
        ReleaseError: The files or the tags contradict each other.
    """
    version: str = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    attribute = _version_attribute(root / "__init__.py")
    if attribute != version:
        raise ReleaseError(f"__init__.py has version {attribute}, pyproject.toml {version}")
    sections = _SECTION.findall((root / "CHANGELOG.md").read_text())
    newest, date = sections[0] if sections else ("", "")
    is_release = any(tag.startswith("v") for tag in tags)
    if is_release and f"v{version}" not in tags:
        raise ReleaseError(f"the commit's tags are {', '.join(tags)}; expected v{version}")
    if newest == "Unreleased" and not is_release:
        if version in dict(sections):
            raise ReleaseError(
                f"CHANGELOG.md lists version {version} as released; raise the version in "
                "pyproject.toml and __init__.py"
            )
    elif newest != version or not date:
        raise ReleaseError(
            f"the first section of CHANGELOG.md is [{newest}]; expected "
            f"`## [{version}] - YEAR-MONTH-DAY`"
        )
    return version


def _version_attribute(path: Path) -> str:
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets) == "__version__":
            return str(ast.literal_eval(statement.value))
    raise ReleaseError(f"{path} has no __version__")


def package_files(root: Path) -> set[str]:
    """Return the paths in the wheel of all installed files that git does not ignore."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    files = set()
    for path in map(Path, listed.splitlines()):
        in_package = (root / path.parts[0] / "__init__.py").exists()
        in_root = len(path.parts) == 1 and path.suffix in {".py", ".pyi", ".typed"}
        if (
            (in_package or in_root)
            and not _NOT_INSTALLED.search(str(path))
            and (root / path).exists()
        ):
            files.add(f"maskrcnn_trt/{path}")
    return files


def check_contents(wheel: Path, sdist: Path, expected: set[str]) -> None:
    """Check that wheel and sdist have all files of the package, and the wheel no others.

    Raises:
        ReleaseError: A file is missing, or must not be there.
    """
    in_wheel = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    with tarfile.open(sdist) as archive:
        in_sdist = {f"maskrcnn_trt/{n.partition('/')[2]}" for n in archive.getnames()}
    for file, missing in ((wheel, expected - in_wheel), (sdist, expected - in_sdist)):
        if missing:
            raise ReleaseError(
                f"{file.name} lacks {', '.join(sorted(missing))}; add the files to "
                "[tool.setuptools] in pyproject.toml"
            )
    if surplus := in_wheel - expected:
        raise ReleaseError(f"{wheel.name} must not contain {', '.join(sorted(surplus))}")


def build() -> tuple[Path, Path]:
    """Build the current commit. The wheel is built from the sdist, which shows that it is complete.

    Returns:
        Paths of wheel and sdist.
    """
    for old in DIST.glob("*"):
        old.unlink()
    # Files of the working tree that are not committed must not get into a release.
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "source.tar")
        _run("git", "archive", "--output", archive, "HEAD")
        with tarfile.open(archive) as source:
            source.extractall(f"{folder}/source", filter="data")
        uv = Path(sys.executable).with_name("uv")
        # setuptools is pinned by requirements.lock.
        options = ("--no-build-isolation", "--python", sys.executable, "--out-dir", DIST)
        _run(uv, "build", "--quiet", *options, f"{folder}/source")
        wheel, sdist = next(DIST.glob("*.whl")), next(DIST.glob("*.tar.gz"))
        _run("git", "init", "--quiet", f"{folder}/source")
        check_contents(wheel, sdist, package_files(Path(folder, "source")))
    return wheel, sdist


def interpreters() -> dict[str, Path]:
    """Return one interpreter of each supported version, by version, from PATH, pyenv and uv."""
    home = Path.home()
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    folders += Path(os.environ.get("PYENV_ROOT", home / ".pyenv")).glob("versions/*/bin")
    folders += (home / ".local/share/uv/python").glob("*/bin")
    found: dict[str, Path] = {}
    for path in _candidates(folders):
        # A shim of pyenv exits with an error if its version is not active.
        script = "import sys, venv; print('.'.join(map(str, sys.version_info[:2])))"
        result = subprocess.run([path, "-c", script], capture_output=True, text=True)
        if result.returncode == 0:
            found.setdefault(result.stdout.strip(), path)
    return dict(sorted(found.items(), key=lambda item: int(item[0].partition(".")[2])))


def _candidates(folders: Iterable[Path]) -> Iterator[Path]:
    for folder in folders:
        for path in folder.glob("python3.*"):
            minor = path.name.partition(".")[2]
            if minor.isdigit() and (3, int(minor)) >= _OLDEST:
                yield path


def try_wheel(wheel: Path, interpreter: Path, version: str) -> None:
    """Install the wheel into a new environment, and run `--version` and `--help` there.

    Raises:
        ReleaseError: The version is another one, or torch was installed.
        subprocess.CalledProcessError: A command failed.
    """
    uv = Path(sys.executable).with_name("uv")
    with tempfile.TemporaryDirectory() as folder:
        _run(uv, "venv", "--quiet", "--python", interpreter, folder)
        python = Path(folder, "bin", "python")
        _run(uv, "pip", "install", "--quiet", "--python", python, wheel)
        printed = _run(Path(folder, "bin", "maskrcnn"), "--version")
        if printed.split()[-1] != version:
            raise ReleaseError(f"maskrcnn --version printed {printed.strip()}; expected {version}")
        _run(Path(folder, "bin", "maskrcnn"), "--help")
        if "True" in _run(
            python, "-c", "import importlib.util as u; print(bool(u.find_spec('torch')))"
        ):
            raise ReleaseError("the base install must not install torch")


def _run(*command: str | Path) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        command, cwd=ROOT, env=environment, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def main() -> int:
    """Run all steps, and return the exit code."""
    try:
        tags = _run("git", "tag", "--points-at", "HEAD").split()
        version = checked_version(ROOT, tags)
        print(f"version {version}", flush=True)
        if _run("git", "status", "--porcelain"):
            print("Uncommitted changes are not in the release.", flush=True)
        wheel, sdist = build()
        _run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
        for path in (wheel, sdist):
            print(
                f"{path.relative_to(ROOT)}: {path.stat().st_size / 1e6:.1f} MB, checked", flush=True
            )
        for python, interpreter in interpreters().items():
            try_wheel(wheel, interpreter, version)
            print(f"Python {python}: installed, --version and --help run", flush=True)
    except (ReleaseError, subprocess.CalledProcessError) as error:
        print(f"{getattr(error, 'stdout', None) or ''}error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
