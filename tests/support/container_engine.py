"""Builds of the Dockerfile by docker or buildah, and commands that run programs in the image."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
_TAG = "localhost/maskrcnn-trt:test"
_BASE = "docker.io/library/python:3.12-slim"
# Time limit of a build in seconds. It is less than the time limit of a test, so that the error of a
# slow build contains the build's output.
_BUILD_S = 540

# Shell script with the arguments ROOT BUNDLE COMMAND...: run COMMAND in the root file system ROOT,
# as docker does with the options of `Docker.command`.
_CHROOT = """
set -e
root=$1 bundle=$2
shift 2
mount --bind "$root" "$root"
mount --bind "$bundle" "$root/bundle"
mount -o remount,bind,ro "$root/bundle"
mount -o remount,bind,ro "$root"
mount -t tmpfs tmpfs "$root/tmp"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
path=/opt/maskrcnn/bin:/usr/local/bin:/usr/bin:/bin
exec chroot --userspec=1000:1000 "$root" /usr/bin/env -i HOME=/home/maskrcnn PATH=$path "$@"
"""


def _output_of(*command: str) -> str:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_BUILD_S)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


def _succeeds(*command: str) -> bool:
    done = subprocess.run(command, capture_output=True, timeout=300, check=False)
    return done.returncode == 0


class Docker:
    """Image that Docker has built."""

    def __init__(self, target: str, extras: str) -> None:
        arguments = ("--target", target, "--build-arg", f"EXTRAS={extras}", "--tag", _TAG, ".")
        _output_of("docker", "build", "--network", "host", *arguments)

    @property
    def configuration(self) -> dict[str, Any]:
        """Docker configuration of the image, with keys such as `User` and `Env`."""
        configuration: dict[str, Any] = json.loads(_output_of("docker", "image", "inspect", _TAG))[
            0
        ]["Config"]
        return configuration

    def command(self, bundle: Path, words: Sequence[str]) -> list[str]:
        """Return a command that runs a program in the image with a read-only root file system."""
        return [
            *("docker", "run", "--rm", "--read-only", "--tmpfs", "/tmp", "--network", "host"),
            *("--volume", f"{bundle}:/bundle:ro", "--entrypoint", words[0], _TAG, *words[1:]),
        ]

    def remove(self) -> None:
        """Remove the image."""
        _output_of("docker", "image", "rm", "--force", _TAG)


class Buildah:
    """Image that buildah has built, and its mounted file system. This requires no Docker engine."""

    def __init__(self, target: str, extras: str) -> None:
        # Build in Docker's format, because OCI images have no health check. Let pip use the same CA
        # certificate in the build as on this machine.
        options = ["--isolation", "chroot", "--network", "host", "--format", "docker"]
        if certificate := os.environ.get("PIP_CERT"):
            options += [
                *("--env", f"PIP_CERT={certificate}"),
                *("--volume", f"{certificate}:{certificate}:ro"),
            ]
        arguments = ("--target", target, "--build-arg", f"EXTRAS={extras}", "--tag", _TAG, ".")
        _output_of("buildah", "bud", *options, *arguments)
        self._container = _output_of("buildah", "from", _TAG).strip()
        self._root = Path(_output_of("buildah", "mount", self._container).strip())
        (self._root / "bundle").mkdir()  # docker creates this mount point itself

    @property
    def configuration(self) -> dict[str, Any]:
        """Docker configuration of the image, with keys such as `User` and `Env`."""
        image = json.loads(_output_of("buildah", "inspect", "--type", "image", _TAG))
        configuration: dict[str, Any] = image["Docker"]["config"]
        return configuration

    def command(self, bundle: Path, words: Sequence[str]) -> list[str]:
        """Return a command that runs a program in the image with a read-only root file system."""
        paths = (str(self._root), str(bundle))
        return ["unshare", "--mount", "sh", "-c", _CHROOT, "sh", *paths, *words]

    def remove(self) -> None:
        """Remove the container and the image."""
        _output_of("buildah", "rm", self._container)
        _output_of("buildah", "rmi", _TAG)


@contextlib.contextmanager
def built_image(target: str, extras: str = "") -> Iterator[Docker | Buildah]:
    """Context manager: build an image from the Dockerfile, and remove it afterwards.

    Skip the test if neither docker nor buildah can be used.

    Args:
        target: `serving` or `training`, a stage of the Dockerfile.
        extras: Extras of the package that the serving image gets.
    """
    image: Docker | Buildah
    if shutil.which("docker") and _succeeds("docker", "info"):
        image = Docker(target, extras)
    elif not shutil.which("buildah"):
        pytest.skip("no Docker engine runs and there is no buildah; install it with apt-get")
    elif os.geteuid() or not _succeeds("unshare", "--mount", "true"):
        pytest.skip("no Docker engine runs, and buildah's images need root to be run")
    elif not (_succeeds("buildah", "inspect", _BASE) or _succeeds("buildah", "pull", _BASE)):
        pytest.skip(f"buildah cannot pull {_BASE}")
    else:
        image = Buildah(target, extras)
    try:
        yield image
    finally:
        image.remove()
