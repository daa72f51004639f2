"""Manifest of a bundle (exported model): files, preprocessing, categories.

This module does not import torch.
"""

import hashlib
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..masks import MaskPaste
from .spec import ResizeRule, ShapeBucket

MANIFEST_NAME = "manifest.json"
# Subfolder of a bundle with sample images for the HTTP server's page. The manifest does not list
# these images.
SAMPLES_FOLDER = "samples"
# Model version that servers report for every bundle.
MODEL_VERSION = "1"
# Regular expression of model names.
MODEL_NAME = r"^[A-Za-z0-9._-]+$"

Precision = Literal["fp32", "tf32", "fp16", "bf16", "int8", "fp8"]
InputDtype = Literal["uint8", "float32"]
EngineKind = Literal["tensorrt", "tensorrt-rtx"]
ArtifactKind = Literal["onnx", "torch", EngineKind]
# File name suffix of each kind of artifact.
ARTIFACT_SUFFIXES: Mapping[ArtifactKind, str] = {
    "onnx": ".onnx",
    "torch": ".pt2",
    "tensorrt": ".plan",
    "tensorrt-rtx": ".rtx",
}
# Suffix of torch programs that are compiled for one GPU architecture.
COMPILED_SUFFIX = ".compiled"
# Precisions for which the value ranges of a model are measured on calibration images.
QUANTIZED_PRECISIONS: tuple[Precision, ...] = ("int8", "fp8")
# Precisions that bundles lack, by kind of artifact: the kind's runtime does not support them.
MISSING_PRECISIONS: Mapping[ArtifactKind, tuple[Precision, ...]] = {
    "onnx": ("bf16", "fp8"),
    "torch": QUANTIZED_PRECISIONS,
}
HardwareCompatibility = Literal["none", "same-compute-capability", "ampere-plus"]


class BundleError(Exception):
    """A bundle (exported model) is incomplete or damaged, or its version is not supported."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Category(_Record):
    """Object class: its id (int64) in the training data set and its name."""

    id: int = Field(ge=-(2**63), lt=2**63)
    name: str


class Preprocessing(_Record):
    """Preprocessing of images to model inputs.

    An image is decoded to RGB and resized so that its shorter side is `min_size` pixels. If its
    longer side would then exceed `max_size`, the image is resized so that the longer side is
    `max_size`. `resize` is the rule for rounding and interpolation. The resized image is padded at
    the right and bottom to one of the model's fixed input sizes. Pixel values are 0..255. The
    exported graph itself normalises them with `pixel_mean` and `pixel_std`, on the same scale.
    """

    min_size: int = Field(gt=0)
    max_size: int = Field(gt=0)
    resize: ResizeRule = "pillow"
    pixel_mean: tuple[float, float, float]
    pixel_std: tuple[float, float, float]
    channel_order: Literal["RGB"] = "RGB"

    def fits(self, bucket: ShapeBucket) -> bool:
        """Whether resized images of at least one aspect ratio fit into a bucket (input size)."""
        return min(bucket) >= self.min_size or max(bucket) >= self.max_size


class BatchProfile(_Record):
    """Batch sizes of one optimisation profile of a TensorRT engine."""

    min: int = Field(ge=1)
    opt: int = Field(ge=1)
    max: int = Field(ge=1)

    @model_validator(mode="after")
    def _check_order(self) -> "BatchProfile":
        if not self.min <= self.opt <= self.max:
            raise ValueError(
                "the batch sizes of an optimization profile must be min <= opt <= max, not "
                f"{self.min}, {self.opt} and {self.max}"
            )
        return self


class EngineBuild(_Record):
    """Build environment of a TensorRT plan (serialised engine), and requirements to run it."""

    # Version of TensorRT or TensorRT-RTX (runtime) that built the plan. Unless the plan is
    # `version_compatible`, loading it needs the same version.
    runtime_version: str
    # Compute capabilities of GPUs that can run the plan, such as `9.0`.
    compute_capabilities: tuple[str, ...] = Field(min_length=1)
    # Major version of CUDA that the runtime was built for, such as `13`, or `unknown`.
    cuda_version: str
    # `current_platform()` of the building machine; the plan runs on this platform only.
    platform: str
    # Versions of the plugins in the plan by `namespace::name`; empty if the plan has no plugins.
    plugins: dict[str, str]
    # Optimisation profiles by index.
    profiles: tuple[BatchProfile, ...] = Field(min_length=1)
    # Name of the building GPU. None: the plan was built for several types of GPU.
    gpu_name: str | None = None
    # Types of GPUs, besides that of the building GPU, that can run the plan.
    hardware_compatibility: HardwareCompatibility = "none"
    # Whether newer versions of the runtime can load the plan.
    version_compatible: bool = False
    # Whether the plan was stored without weights. `maskrcnn engine refit` inserts the weights.
    stripped: bool = False
    # Version of the plugins' PTX, such as `9.0`, and the lowest CUDA version of drivers that load
    # it, such as 13000 for 13.0. None: the plan has no plugins.
    ptx_version: str | None = None
    ptx_cuda_version: int | None = None


class CompileTarget(_Record):
    """Environment that torch compiled a program for. The program needs exactly this environment."""

    torch_version: str
    # Major and minor version, such as `3.12`.
    python_version: str
    # Compute capability of the GPU, such as `9.0`.
    compute_capability: str


class CompiledProgram(_Record):
    """Manifest entry of a program that torch compiled ahead of time for one GPU architecture."""

    path: str
    sha256: str
    target: CompileTarget


class Artifact(_Record):
    """Manifest entry of a model file, exported for one runtime, input size and precision."""

    path: str
    sha256: str
    kind: ArtifactKind
    precision: Precision
    input_dtype: InputDtype
    bucket: ShapeBucket
    # None unless `kind` is an `EngineKind`.
    engine: EngineBuild | None = None
    # None unless the artifact is a torch program that was exported on a machine with a GPU.
    compiled: CompiledProgram | None = None

    @model_validator(mode="after")
    def _check_kind(self) -> "Artifact":
        if (self.engine is not None) != (self.kind in get_args(EngineKind)):
            raise ValueError(
                f"artifact {self.path!r}: TensorRT engines need the field `engine`, and other "
                "artifacts must not have it"
            )
        if self.compiled is not None and self.kind != "torch":
            raise ValueError(
                f"artifact {self.path!r}: only torch programs may have the field `compiled`"
            )
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the exported file and its compiled program (if any), relative to the bundle."""
        compiled = () if self.compiled is None else (self.compiled.path,)
        return (self.path, *compiled)


class Provenance(_Record):
    """Origin of a bundle: checkpoint, its metrics, version of the exporter, time of export."""

    checkpoint: str
    checkpoint_sha256: str
    # SHA-256 of the model's configuration. `checkpoint_sha256` does not cover the configuration if
    # the weights file is from another program. None: exported before this field existed.
    config_sha256: str | None = None
    iteration: int
    metrics: dict[str, float]
    exported_by: str
    exported_at: str


class Manifest(_Record):
    """Description of a bundle (folder with an exported model), stored in its `manifest.json`."""

    schema_version: Literal[1] = 1
    model_name: str = Field(pattern=MODEL_NAME)
    categories: tuple[Category, ...] = Field(min_length=1)
    preprocessing: Preprocessing
    max_detections: int = Field(gt=0)
    mask_side: int = Field(gt=0)
    mask_paste: MaskPaste = "torchvision"
    artifacts: tuple[Artifact, ...] = Field(min_length=1)
    provenance: Provenance

    @model_validator(mode="after")
    def _check_paths(self) -> "Manifest":
        for name in (name for artifact in self.artifacts for name in artifact.paths):
            path = Path(name)
            if path.is_absolute() or ".." in path.parts:
                raise ValueError(f"artifact path {name!r} is not inside the bundle folder")
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> "Manifest":
        shorter, longer = self.preprocessing.min_size, self.preprocessing.max_size
        for artifact in self.artifacts:
            if not self.preprocessing.fits(artifact.bucket):
                raise ValueError(
                    f"artifact {artifact.path!r}: no image fits the input size {artifact.bucket} "
                    f"(bucket) after resizing with preprocessing.min_size {shorter} and "
                    f"preprocessing.max_size {longer}"
                )
        return self

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes. Label 1 has the name `class_names[0]`."""
        return tuple(category.name for category in self.categories)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Precisions of the exported models, such as `fp16`, in order of first appearance."""
        return tuple(dict.fromkeys(artifact.precision for artifact in self.artifacts))

    def artifacts_for(
        self, precision: Precision, kind: ArtifactKind = "onnx"
    ) -> tuple[Artifact, ...]:
        """Return the exported models of a precision and a kind, such as `onnx`, one per input size.

        Raises:
            BundleError: the bundle (exported model) has no model of this precision and kind.
        """
        chosen = tuple(a for a in self.artifacts if (a.precision, a.kind) == (precision, kind))
        if chosen:
            return chosen
        if precision not in get_args(Precision):
            raise BundleError(
                f"there is no precision {precision!r}; the bundle has {', '.join(self.precisions)}"
            )
        if precision in MISSING_PRECISIONS.get(kind, ()):
            runtime = "ONNX Runtime" if kind == "onnx" else "the torch backend"
            raise BundleError(
                f"{runtime} does not compute in {precision}; choose another backend or precision"
            )
        available = dict.fromkeys(f"{a.precision} {a.kind}" for a in self.artifacts)
        engine = "" if kind == "onnx" else f" --engine {kind}"
        raise BundleError(
            f"the bundle has no {precision} {kind} artifact, only {', '.join(available)}; export "
            f"it with `maskrcnn export CHECKPOINT -o BUNDLE --precision {precision}{engine}`"
        )


def current_platform() -> str:
    """Return operating system and CPU architecture, such as `linux-x86_64`."""
    return f"{platform.system()}-{platform.machine()}".lower()


def sha256_of(path: Path) -> str:
    """Return the hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(bundle: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into the bundle folder."""
    (bundle / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2) + "\n", "utf-8")


def read_manifest(bundle: Path) -> Manifest:
    """Read and validate the manifest of a bundle (exported model). Do not check file hashes.

    Raises:
        BundleError: the manifest is missing, unreadable, invalid, or has an unsupported version.
    """
    path = bundle / MANIFEST_NAME
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        fault = (
            f"is not a bundle: it has no {MANIFEST_NAME}" if bundle.exists() else "does not exist"
        )
        remedy = "make a bundle with `maskrcnn export CHECKPOINT -o BUNDLE`"
        if checkpoints := sorted(bundle.glob("*.pth")):  # the folder of a training run
            remedy = f"give a checkpoint from this folder, such as {checkpoints[-1]}"
        raise BundleError(f"{bundle} {fault}; {remedy}") from None
    except OSError as error:
        raise BundleError(
            f"{path} cannot be read ({error.strerror}); it must be a file that this user may read"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        fault = first["msg"].removeprefix("Value error, ")
        raise BundleError(f"{path}: {where}: {fault}; export the bundle again") from None
    except ValueError as error:  # for example a null byte
        raise BundleError(f"{str(bundle)!a} is not a path: {error}") from None


def verify_artifact(bundle: Path, artifact: Artifact) -> None:
    """Check the SHA-256 of all files of an artifact: the model, and its compiled program if any.

    Raises:
        BundleError: a file is missing or unreadable, its SHA-256 differs from the manifest's, or
            its path is not UTF-8.
    """
    verified_path(bundle, artifact)
    if artifact.compiled:
        verified_path(bundle, artifact.compiled)


def verified_path(bundle: Path, file: Artifact | CompiledProgram) -> Path:
    """Return the path of a file in a bundle (exported model) after checking its SHA-256.

    Raises:
        BundleError: the file is missing or unreadable, its SHA-256 differs from the manifest's, or
            its path is not UTF-8.
    """
    path = bundle / file.path
    try:
        str(path).encode()
    except UnicodeEncodeError:  # neither ONNX Runtime nor torch can open it
        raise BundleError(
            f"the path {path} has bytes that are not UTF-8; rename or move the bundle"
        ) from None
    if not path.is_file():
        raise BundleError(f"{path} is missing from the bundle; export the bundle again")
    try:
        digest = sha256_of(path)
    except OSError as error:
        raise BundleError(
            f"{path} cannot be read ({error.strerror}); it must be a file that this user may read"
        ) from None
    if digest != file.sha256:
        raise BundleError(
            f"{path} is not the file that was exported (its SHA-256 differs from the manifest's); "
            "export the bundle again"
        )
    return path
