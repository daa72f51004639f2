"""Options and arguments that several commands share: files, output, connection, and model."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import click

from ...model.bundle.manifest import (
    ARTIFACT_SUFFIXES,
    MANIFEST_NAME,
    MISSING_PRECISIONS,
    QUANTIZED_PRECISIONS,
    ArtifactKind,
    Precision,
)
from ...model.bundle.spec import ShapeBucket
from ...model.config.option_types import FiniteRange
from ..config import BackendName, ReportFormat, check_address

if TYPE_CHECKING:
    from ..client import Credentials

_Command = Callable[..., None]

# Click type of an image or a folder of images.
SOURCE = click.Path(exists=True, path_type=Path)

REPORT_OPTIONS = (
    click.option(
        "-o", "--output", type=click.Path(file_okay=False), default="detections",
        show_default=True,
        help="Output folder. Files of earlier runs stay, unless this run writes a file of the same "
        "name. To write annotated images, the folder must not hold input images.",
    ),
    click.option(
        "--format", "formats", multiple=True, type=click.Choice(get_args(ReportFormat)),
        default=("pictures", "coco"), show_default=True,
        help="Output format; repeat the option for several. `pictures`: a PNG of each image with "
        "its detections drawn. `coco`: one detections.json in COCO's results format. The id of "
        "an image is its name without suffix, as an integer if decimal. To evaluate against "
        "annotations with other ids, use `maskrcnn eval`. `numpy`: an NPZ of the arrays of each "
        "image. A PNG or NPZ has the name of its image, as street.png for street.jpg. If "
        "several images share that name, it includes the suffix, as street.jpg.png, and so do "
        "the ids of these images.",
    ),
    click.option(
        "--score-threshold", type=FiniteRange(0, 1), default=0.5, show_default=True,
        help="Keep only detections with a higher score.",
    ),
)  # fmt: skip

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)

CREDENTIAL_OPTIONS = (
    click.option(
        "--tls/--no-tls", default=None,
        help="Use TLS. The options below imply --tls. With --no-tls, the token is sent in plain "
        "text, so use --no-tls only if a service mesh or the like encrypts the connection.",
    ),
    click.option(
        "--root-certificate", type=_FILE,
        help="PEM of the CA that signed the server's certificate. Not needed for public CAs.",
    ),
    click.option("--certificate", type=_FILE, help="PEM of the client certificate."),
    click.option("--key", type=_FILE, help="PEM of the private key of --certificate."),
    click.option(
        "--token-file", type=_FILE,
        help="File with the bearer token for the server; # begins a comment.",
    ),
)  # fmt: skip


def options_of(*options: Callable[[_Command], _Command]) -> Callable[[_Command], _Command]:
    """Return a decorator that adds options to a command. --help lists them in the given order."""

    def decorate(command: _Command) -> _Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def silence_grpc() -> None:
    """Keep gRPC's own log lines out of standard error. Call it before gRPC is imported."""
    # gRPC logs failed handshakes and violations of the protocol, in its own format.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def is_address(path: object) -> bool:
    """Return whether a path is an address such as `s3://bucket/folder`, not a local path."""
    return "://" in str(path)


def files_and_folder(
    images: Sequence[Path | str], output: str, formats: Sequence[ReportFormat]
) -> tuple[list[Path], Path]:
    """Return the input image files and the output folder, after checking both.

    Raises:
        click.UsageError: A path is an address, such as `s3://bucket/folder`; there are no images;
            two images would have the same COCO image ID; the output folder cannot be written; or
            annotated images would be written into a folder of input images.
    """
    # Imported here because the module loads Pillow, which --help does not need.
    from .reports import check_folder, check_image_ids, image_files

    for image in images:
        if is_address(image):
            raise click.UsageError(
                f"{image} is an address, not a local path; reading it requires --ray"
            )
    if is_address(output):
        raise click.UsageError(
            f"{output} is an address, not a local folder, and only predict --ray can write to it; "
            "choose a folder with --output"
        )
    files, folder = image_files([Path(image) for image in images]), Path(output)
    check_image_ids(files)
    check_folder(folder, files, formats)
    return files, folder


def checked_address(_: click.Context, __: click.Parameter, value: str) -> str:
    """Validate and return the address of a server. Callback of a click argument.

    Raises:
        click.BadParameter: the address is not valid.
    """
    try:
        check_address(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    return value


def credentials_from_options(
    *,
    tls: bool | None,
    root_certificate: Path | None,
    certificate: Path | None,
    key: Path | None,
    token_file: Path | None,
) -> "Credentials":
    """Return the credentials that the command's options describe.

    `tls` states whether to use TLS. None: use it if a certificate, key or token file is given.

    Raises:
        click.UsageError: the options contradict each other, or a file is not valid.
    """
    from ..client import Credentials

    files = (root_certificate, certificate, key)
    # Credentials imply TLS unless --no-tls is given.
    uses_tls = bool(token_file or any(files)) if tls is None else tls
    if (certificate is None) != (key is None):
        raise click.UsageError("--certificate and --key go together; give both or none")
    if any(files) and not uses_tls:
        raise click.UsageError("certificates require TLS; omit the certificates or --no-tls")
    return Credentials(
        root_certificate=_read_pem(root_certificate, "certificate"),
        certificate=_read_pem(certificate, "certificate"),
        key=_read_pem(key, "private key"),
        token=None if token_file is None else _read_token(token_file),
        tls=uses_tls,
    )


def _read_pem(path: Path | None, kind: str) -> bytes | None:
    from ..client.connection import is_pem

    content = None if path is None else path.read_bytes()
    if content is not None and not is_pem(content, kind):
        raise click.UsageError(f"{path} contains no {kind} in PEM format; give a PEM file")
    return content


def _read_token(path: Path) -> str:
    from ..credential_files import read_tokens
    from ..errors import ServingError

    try:
        tokens = read_tokens(path)
    except ServingError as error:
        raise click.UsageError(str(error)) from None
    if len(tokens) > 1:
        raise click.UsageError(f"{path} holds {len(tokens)} tokens; keep only your own in the file")
    return tokens[0]


def bundle_for_backend(
    reference: str | Path,
    backend: BackendName,
    precisions: Sequence[Precision] = (),
    buckets: Sequence[ShapeBucket] = (),
    before_export: Callable[[], object] = lambda: None,
) -> Path:
    """Return a model's bundle folder. If the reference is not a bundle, first export the model.

    Args:
        reference: Folder or manifest of a bundle, path or URL of a checkpoint, or name of a
            published model. For details, see `bundle_from_reference`.
        backend: Backend that will run the bundle. `auto`: torch if the machine has an NVIDIA GPU,
            ONNX Runtime otherwise.
        precisions: Precisions to export. Empty: fp32.
        buckets: Input sizes to export. Empty: the model's own input sizes.
        before_export: Function that is called before an export. If it raises an error, nothing is
            exported, and the error is raised.

    Raises:
        click.UsageError: The reference is the file of a graph or engine, not a bundle. Or the model
            must be exported, and the backend does not support a precision.
        ZooError: No published model has this name, or this package does not support the model.
        DownloadError: The download failed, or the checksum of the downloaded file is wrong.
        click.exceptions.Exit: The export failed. Its error message is on standard error.
    """
    # Imported here because --help does not need them.
    from ...model.weights.bundle_cache import bundle_from_reference
    from ..host import gpu_names

    path = Path(reference)
    if path.name == MANIFEST_NAME:
        path = path.parent
    if path.is_dir():
        return path
    if path.suffix in ARTIFACT_SUFFIXES.values() and path.is_file():
        raise click.UsageError(
            f"{path} is an exported graph or engine, not a bundle; give the bundle, a folder with "
            f"{MANIFEST_NAME}"
        )
    if backend == "auto":
        backend = "torch" if gpu_names() else "onnxruntime"
    _check_precisions(precisions, backend)
    engines = () if backend == "onnxruntime" else (backend,)
    return bundle_from_reference(
        reference, precisions or ("fp32",), engines, buckets, before_export
    )


def _check_precisions(precisions: Sequence[Precision], backend: BackendName) -> None:
    missing = {
        "onnxruntime" if kind == "onnx" else kind: MISSING_PRECISIONS.get(kind, ())
        for kind in get_args(ArtifactKind)
    }
    for precision in precisions:
        if precision not in missing[backend]:
            continue
        runtime = "ONNX Runtime" if backend == "onnxruntime" else backend
        others = " or ".join(name for name, lacking in missing.items() if precision not in lacking)
        remedy = f"choose another --precision, or --backend {others}"
        if precision in QUANTIZED_PRECISIONS:  # a checkpoint is exported without calibration images
            remedy += " with a bundle that was exported with --calibration"
        raise click.UsageError(f"{runtime} does not compute in {precision}; {remedy}")
