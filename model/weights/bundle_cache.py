"""Cache of bundles (exported models), for models that are given by path, URL or name.

This module does not import torch.
"""

import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import click
import yaml

from ... import __version__
from ...plugins.runtime.user_cache import cache_folder
from ..atomic_files import check_creatable
from ..bundle.manifest import BundleError, Precision, read_manifest, sha256_of, verify_artifact
from ..bundle.spec import ShapeBucket
from ..child_process import module_command
from ..config.strict_yaml import value_from_yaml
from ..download.local_files import exclusive_lock
from ..exit_signals import exit_on_signals
from .downloads import CONFIG_NAME, base_config, is_url, mirror_checksums, weights_path
from .zoo import is_zoo_name, zoo_model

_STDERR: Final = 2  # file descriptor


def bundle_from_reference(
    reference: str | Path,
    precisions: Sequence[Precision] = ("fp32",),
    engines: Sequence[str] = (),
    buckets: Sequence[ShapeBucket] = (),
    before_export: Callable[[], object] = lambda: None,
) -> Path:
    """Return the path of a model's bundle. If necessary, download the model and export it first.

    A bundle is a folder with an exported model. Exported bundles are cached. If a file of a cached
    bundle is missing or damaged, the model is exported again.

    Args:
        reference: The model, in one of these forms:
            - path of a folder (a bundle), or a path that does not exist: returned unchanged
            - path or http(s) URL of a checkpoint, or of another implementation's weights
            - name of a published model, which begins with `torchvision:` or `detectron2:`
        precisions: Precisions to export, unless `reference` is a bundle.
        engines: TensorRT engines to build beside the ONNX files, as values of the option
            `--engine` of `maskrcnn export`.
        buckets: Input sizes to export. If it is empty, the model's own input sizes are used.
        before_export: Function that is called after the download, unless the cache holds the
            intact bundle. Its exceptions reach the caller.

    Raises:
        ZooError: No published model has this name, or this program does not support the model.
        DownloadError: The download failed, or the file has another checksum.
        BundleError: The cache folder cannot be created or written.
        click.exceptions.Exit: The export failed. Its error message is on standard error.
    """
    if is_zoo_name(reference):
        model = zoo_model(str(reference))
        # A mirror's file can differ from the published one, so the name of the bundle's folder
        # contains the file's checksum.
        checksum = mirror_checksums().get(model.file_name, model.checksum)
        label = re.sub(r"\W+", "-", f"{model}-{checksum.digest[:8]}")
    elif is_url(reference) or Path(reference).is_file():
        path = weights_path(reference)
        label = f"{path.stem}-{sha256_of(path)[:12]}"
        # The settings in these files affect the exported model.
        for config in _config_files(path.with_name(CONFIG_NAME)):
            label += f"-{sha256_of(config)[:12]}"
    else:
        return Path(reference)
    # The folder's name includes this program's version, because another version may export other
    # graphs.
    settings = ["+".join(precisions), *map(str, buckets), *engines, __version__]
    bundle = cache_folder("bundles") / "-".join([label, *settings])
    if not _is_intact(bundle):
        try:
            check_creatable(bundle)
        except OSError as error:
            raise BundleError(
                f"cannot write to the cache folder {bundle.parent} ({error.strerror}); set the "
                "environment variable XDG_CACHE_HOME to another folder, or export the model to a "
                "folder of your choice with `maskrcnn export`"
            ) from None
        weights_path(reference)  # download here, to show progress and errors
        before_export()
        bundle.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(bundle, wait=True):
            if not _is_intact(bundle):
                _export(str(reference), bundle, precisions, engines, buckets)
    return bundle


def _config_files(path: Path) -> list[Path]:
    """Return the detectron2 configuration `path` and the files it inherits from, if they exist."""
    files: list[Path] = []
    next_file: Path | None = path
    while next_file and next_file.is_file() and next_file.resolve() not in files:
        files.append(next_file.resolve())
        try:
            next_file = base_config(next_file, value_from_yaml(next_file.read_bytes()))
        except (OSError, UnicodeError, yaml.YAMLError):
            break  # if the model needs the file, the export reports the error
    return files


def _is_intact(folder: Path) -> bool:
    """Return whether a folder is a bundle, and all its files have the SHA-256 in its manifest."""
    try:
        for artifact in read_manifest(folder).artifacts:
            verify_artifact(folder, artifact)
    except BundleError:
        return False
    return True


def _export(
    reference: str,
    bundle: Path,
    precisions: Sequence[Precision],
    engines: Sequence[str],
    buckets: Sequence[ShapeBucket],
) -> None:
    """Export a model to the folder `bundle` in a child process.

    Raises:
        click.exceptions.Exit: The export failed.
    """
    # Export in a child process, so that a server that calls this function does not load torch and
    # the weights.
    command = [*module_command("maskrcnn_trt"), "export", "-o", str(bundle)]
    for option, values in {
        "--precision": precisions,
        "--engine": engines,
        "--shape": buckets,
    }.items():
        for value in values:
            command += [option, str(value)]
    command += ["--", reference]  # a file's name may begin with a dash
    # Send the export's output to standard error. Standard output is for the calling command.
    with exit_on_signals():  # `subprocess.run` kills the child if an exception is raised
        code = subprocess.run(command, stdout=_STDERR, check=False).returncode
    if code:
        raise click.exceptions.Exit(code if code > 0 else 128 - code)
