"""The manifest of a bundle: what export promises and serving may rely on. Needs no torch."""

import hashlib
import platform
from pathlib import Path
from typing import Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .masks import MaskPaste
from .spec import ShapeBucket

MANIFEST_NAME = "manifest.json"

Precision = Literal["fp32", "tf32", "fp16", "bf16"]
InputDtype = Literal["uint8", "float32"]
EngineKind = Literal["tensorrt", "tensorrt-rtx"]
ArtifactKind = Literal["onnx", "torch", EngineKind]


class BundleError(Exception):
    """A bundle is missing something, damaged, or not meant for this version."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Category(_Record):
    """A class: its id in the data set it was trained on, and its name."""

    id: int
    name: str


class Preprocessing(_Record):
    """How an image becomes a model input.

    The image is decoded to RGB, resized so that its shorter side is `min_size` unless the longer
    one would exceed `max_size`, and padded at the right and the bottom to a bucket. Normalisation
    (`pixel_mean`, `pixel_std`, in 0..255) happens inside the graph.
    """

    min_size: int = Field(gt=0)
    max_size: int = Field(gt=0)
    pixel_mean: tuple[float, float, float]
    pixel_std: tuple[float, float, float]
    channel_order: Literal["RGB"] = "RGB"

    def fits(self, bucket: ShapeBucket) -> bool:
        """Whether images of some ratio of sides, once resized, have a place in a bucket."""
        return min(bucket) >= self.min_size or max(bucket) >= self.max_size


class BatchProfile(_Record):
    """Batch sizes that an engine takes in one of its optimisation profiles."""

    min: int = Field(ge=1)
    opt: int = Field(ge=1)
    max: int = Field(ge=1)

    @model_validator(mode="after")
    def _check_order(self) -> "BatchProfile":
        if not self.min <= self.opt <= self.max:
            raise ValueError(f"a profile's {self.min}, {self.opt} and {self.max} do not ascend")
        return self


class EngineBuild(_Record):
    """What an engine was built with, and what it runs on."""

    runtime_version: str
    """Version of the runtime that built the plan, which is the one that loads it."""
    compute_capabilities: tuple[str, ...] = Field(min_length=1)
    """Those of the GPUs that run the plan, as in `9.0`."""
    cuda_version: str
    """Major version of CUDA that the runtime was built for, as in `13`; else `unknown`."""
    platform: str
    """That of `current_platform` where the plan was built, and runs."""
    plugins: dict[str, str]
    """Versions of the plugins inside, by `namespace::name`; none where bodies were used."""
    profiles: tuple[BatchProfile, ...] = Field(min_length=1)
    """By index of the optimisation profile."""


class CompileTarget(_Record):
    """What compiled code depends on."""

    torch_version: str
    python_version: str
    """As in `3.12`."""
    compute_capability: str
    """That of the GPU, as in `9.0`."""


class CompiledProgram(_Record):
    """What torch compiled of a program; elsewhere than at its target, torch compiles anew."""

    path: str
    sha256: str
    target: CompileTarget


class Artifact(_Record):
    """One file of the bundle that computes detections for one shape bucket and precision."""

    path: str
    sha256: str
    kind: ArtifactKind
    precision: Precision
    input_dtype: InputDtype
    bucket: ShapeBucket
    engine: EngineBuild | None = None
    compiled: CompiledProgram | None = None
    """Beside a program of torch that was exported where a GPU is."""

    @model_validator(mode="after")
    def _check_kind(self) -> "Artifact":
        if (self.engine is not None) != (self.kind in get_args(EngineKind)):
            raise ValueError(
                f"artifact {self.path!r}: an engine, and only it, says how it was built"
            )
        if self.compiled is not None and self.kind != "torch":
            raise ValueError(f"artifact {self.path!r}: only a program of torch is compiled apart")
        return self

    @property
    def paths(self) -> tuple[str, ...]:
        """Its files within the bundle."""
        compiled = () if self.compiled is None else (self.compiled.path,)
        return (self.path, *compiled)


class Provenance(_Record):
    """Where the weights come from."""

    checkpoint: str
    checkpoint_sha256: str
    iteration: int
    metrics: dict[str, float]
    exported_by: str
    exported_at: str


class Manifest(_Record):
    """The bundle's table of contents, stored as `manifest.json`."""

    schema_version: Literal[1] = 1
    model_name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
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
                raise ValueError(f"artifact path {name!r} leaves the bundle")
        return self

    @model_validator(mode="after")
    def _check_sizes(self) -> "Manifest":
        shorter, longer = self.preprocessing.min_size, self.preprocessing.max_size
        for artifact in self.artifacts:
            if not self.preprocessing.fits(artifact.bucket):
                raise ValueError(
                    f"artifact {artifact.path!r}: its bucket {artifact.bucket} holds no image by "
                    f"preprocessing, whose min_size is {shorter} and max_size {longer}"
                )
        return self

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names by label: label 1 is `class_names[0]`."""
        return tuple(category.name for category in self.categories)

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """Precisions the bundle can serve, in the order of its artefacts."""
        return tuple(dict.fromkeys(artifact.precision for artifact in self.artifacts))

    def artifacts_for(
        self, precision: Precision, kind: ArtifactKind = "onnx"
    ) -> tuple[Artifact, ...]:
        """Artefacts of one precision and kind, one a shape bucket.

        Raises:
            BundleError: the bundle holds none of them.
        """
        chosen = tuple(a for a in self.artifacts if (a.precision, a.kind) == (precision, kind))
        if chosen:
            return chosen
        if precision == "bf16" and kind != "torch":
            raise BundleError(
                "only the torch backend computes in bf16; choose it, or another precision"
            )
        held = dict.fromkeys(f"{a.precision} {a.kind}" for a in self.artifacts)
        engine = "" if kind == "onnx" else f" --engine {kind}"
        raise BundleError(
            f"the bundle has no {precision} {kind} artefact, only {', '.join(held)}; export it "
            f"with `maskrcnn export CHECKPOINT -o BUNDLE --precision {precision}{engine}`"
        )


def current_platform() -> str:
    """Operating system and machine, as in `linux-x86_64`."""
    return f"{platform.system()}-{platform.machine()}".lower()


def sha256_of(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(bundle: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into the bundle folder."""
    (bundle / MANIFEST_NAME).write_text(manifest.model_dump_json(indent=2) + "\n")


def read_manifest(bundle: Path) -> Manifest:
    """Read and validate a bundle's manifest; the artefacts' hashes are checked when loaded.

    Raises:
        BundleError: no manifest there, or one that cannot be read or served, or that this version
            does not understand.
    """
    path = bundle / MANIFEST_NAME
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise BundleError(
            f"{bundle} is no bundle: it has no {MANIFEST_NAME}; "
            "make one with `maskrcnn export CHECKPOINT -o BUNDLE`"
        ) from None
    except OSError as error:
        raise BundleError(
            f"{path} cannot be read ({error.strerror}); it must be a file that this user may read"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        fault = first["msg"].removeprefix("Value error, ")
        raise BundleError(f"{path}: {where}: {fault}; export the bundle again") from None


def verified_path(bundle: Path, file: Artifact | CompiledProgram) -> Path:
    """Path of a file of the bundle whose bytes are the ones the manifest names.

    Raises:
        BundleError: the file is missing or its SHA-256 differs.
    """
    path = bundle / file.path
    if not path.is_file():
        raise BundleError(f"{path} is missing from the bundle; export the bundle again")
    if sha256_of(path) != file.sha256:
        raise BundleError(
            f"{path} is not the file that was exported (its SHA-256 differs from the manifest's); "
            "export the bundle again"
        )
    return path
