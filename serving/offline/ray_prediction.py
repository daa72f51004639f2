"""Detection in any number of images with Ray Data, on this machine or a cluster."""

import contextlib
import errno
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import ray
import ray.data
import ray.exceptions

from ...model.images import ImageError
from ...model.manifest import Precision, read_manifest
from ..config import BackendName
from ..detections import DetectionOptions, Detections
from ..errors import ServingError
from ..results.coco_json import coco_results
from .predictor import Predictor
from .stored_images import StoredImages, quoted_address, read_image, stored_images

_RLE = pa.struct([("size", pa.list_(pa.int64())), ("counts", pa.string())])
_DETECTION = pa.struct(
    [
        ("category_id", pa.int64()),
        ("bbox", pa.list_(pa.float64())),
        ("score", pa.float64()),
        ("segmentation", _RLE),
    ]
)
SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("error", pa.string()),
        ("height", pa.int64()),
        ("width", pa.int64()),
        ("detections", pa.list_(_DETECTION)),
    ]
)
"""Of a row an image: `error` says why there are no detections, else `height` and `width` are its
pixels and `detections` COCO's results."""


class RaySummary(NamedTuple):
    """What a run left behind."""

    images: int
    failures: int


class _Detector:
    """An actor, which holds the model."""

    def __init__(self, options: DetectionOptions, predictor: dict[str, Any]) -> None:
        self._options = options
        self._predictor = Predictor(**predictor)

    def __call__(self, batch: dict[str, Any]) -> pa.Table:
        reads = list(zip(batch["bytes"].tolist(), batch["error"].tolist(), strict=True))
        images = (data for data, fault in reads if not fault)
        outcomes = self._predictor.detect_many(images, self._options)
        rows = []
        for path, (_, fault) in zip(batch["path"].tolist(), reads, strict=True):
            outcome = fault or next(outcomes)
            row: dict[str, Any] = {"path": path}
            if isinstance(outcome, Detections):
                row |= {"height": outcome.height, "width": outcome.width}
                row["detections"] = coco_results(path, outcome)
            else:
                row["error"] = str(outcome)
            rows.append(row)
        return pa.Table.from_pylist(rows, SCHEMA)


def _with_bytes(
    stores: Sequence[pyarrow.fs.FileSystem], row: dict[str, Any]
) -> dict[str, str | bytes]:
    """The bytes of a row's image, or the error that says why there are none."""
    path = row["path"]
    try:
        return {"path": path, "bytes": read_image(stores[row["store"]], path), "error": ""}
    except ImageError as error:
        return {"path": path, "bytes": b"", "error": str(error)}


def predict_with_ray(
    bundle: Path,
    sources: Sequence[str],
    output: str,
    options: DetectionOptions,
    *,
    precision: Precision | None = None,
    backend: BackendName = "auto",
    max_batch: int = 8,
) -> RaySummary:
    """Detect in all images of files, folders and buckets, with a model a GPU, or else a CPU.

    Args:
        bundle: The bundle's folder, which every machine of the cluster has at this path.
        sources: Paths, or addresses as `s3://bucket/folder`; `stored_images` says which images.
        output: New or empty folder, as an absolute path or an address, for Parquet files of
            `SCHEMA`, written as blocks are done.
        options: Which detections to keep.
        precision: What to compute in; none, the backend's first precision in the bundle.
        backend: What computes.
        max_batch: Images that are computed at once.

    Raises:
        BundleError: there is no bundle.
        FileExistsError: there is something in `output`, with which the results would mix.
        ServingError: there are no images, a bucket cannot be reached, the backend or the cluster
            failed, or not every image has its row.
    """
    read_manifest(bundle)  # so that no cluster has to find out
    predictor = {
        "bundle": bundle.resolve(),
        "precision": precision,
        "backend": backend,
        "max_batch": max_batch,
    }
    detector = {"options": options, "predictor": predictor}
    with _reached_storage():
        target = quoted_address(output)
        files, folder = pyarrow.fs.FileSystem.from_uri(target)
        if files.get_file_info(pyarrow.fs.FileSelector(folder, allow_not_found=True)):
            fault = "holds files already; choose another folder"
            raise FileExistsError(errno.EEXIST, fault, output)
        images = stored_images(sources)
        _write_detections(images, detector, 4 * max_batch, target)
        written = pyarrow.dataset.dataset(folder, filesystem=files)
        return _summary(written, len(images.places), output)


def _summary(written: pyarrow.dataset.Dataset, images: int, output: str) -> RaySummary:
    """What a run left behind.

    Raises:
        ServingError: there are more or fewer rows than images.
    """
    rows = written.count_rows()
    if rows != images:
        raise ServingError(
            f"{output} holds {rows} rows of {images} images; detect anew, in a folder that nothing "
            "else writes to"
        )
    return RaySummary(rows, written.count_rows(filter=pyarrow.dataset.field("error").is_valid()))


@contextlib.contextmanager
def _reached_storage() -> Iterator[None]:
    """Say what to do where files or buckets cannot be used.

    Raises:
        ServingError: they cannot, and the fault does not itself name a file.
    """
    try:
        yield
    except (OSError, pa.ArrowInvalid) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise ServingError(
            f"images or results cannot be reached: {error}; a bucket must be there, at Amazon or "
            "where AWS_ENDPOINT_URL says, and open to AWS_ACCESS_KEY_ID"
        ) from error


def _write_detections(
    images: StoredImages, detector: dict[str, Any], batch_size: int, output: str
) -> None:
    with contextlib.ExitStack() as started:
        if not ray.is_initialized():  # or it would be its owner's, who may go on with it
            started.enter_context(ray.init())
        try:
            _detections(images, detector, batch_size).write_parquet(output)
        except ray.exceptions.RayError as error:
            cause = str(error).strip().rpartition("\n")[2]
            raise ServingError(f"Ray could not go on: {cause}") from error


def _detections(
    images: StoredImages, detector: dict[str, Any], batch_size: int
) -> ray.data.Dataset:
    """The plan of the work, which starts when its rows are asked for.

    The images are not read by Ray, which passes over hidden ones and stops at what it cannot read.
    """
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    gpus = int(resources.get("GPU", 0))
    rows = ray.data.from_items([{"store": store, "path": path} for store, path in images.places])
    return rows.map(partial(_with_bytes, images.stores)).map_batches(
        _Detector,
        batch_size=batch_size,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=gpus or int(resources["CPU"])),
        fn_constructor_kwargs=detector,
        num_gpus=1 if gpus else None,
        num_cpus=None if gpus else 1,
    )
