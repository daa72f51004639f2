"""Detection in image files, folders and cloud buckets with Ray Data, on a machine or a cluster."""

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import quote

import pyarrow as pa
import pyarrow.dataset
import pyarrow.fs
import ray
import ray.data
import ray.exceptions

from ..model.bundle.manifest import Precision, read_manifest
from ..model.image_files import IMAGE_FILE_SUFFIXES, is_image_file, png_from_other_formats
from ..model.image_limits import ImageError, check_file_size, image_error_from_os_error
from ..model.plurals import counted
from .config import BackendName
from .detections import DetectionOptions, Detections
from .errors import ServingError
from .offline import Detector
from .result_formats import coco_results

_RLE = pa.struct([("size", pa.list_(pa.int64())), ("counts", pa.string())])
_DETECTION = pa.struct(
    [
        ("category_id", pa.int64()),
        ("bbox", pa.list_(pa.float64())),
        ("score", pa.float64()),
        ("segmentation", _RLE),
    ]
)
# Maximum number of retries of a batch whose process dies.
_MAX_RETRIES = 3
# Schema of the results, one row per image. A failed image has `path` and `error`. Any other image
# has `path`, `height` and `width` in pixels, and `detections` in COCO's results format.
SCHEMA = pa.schema(
    [
        ("path", pa.string()),
        ("error", pa.string()),
        ("height", pa.int64()),
        ("width", pa.int64()),
        ("detections", pa.list_(_DETECTION)),
    ]
)

# Special characters of an address that `_quoted_address` leaves as they are. `?` begins the
# parameters, and `%` begins an escape sequence.
_UNQUOTED = "/:?&=%@+,;!$'()*~"


class RaySummary(NamedTuple):
    """Number of images in a run, and number of those that failed."""

    images: int
    failures: int


class StoredImages(NamedTuple):
    """Locations of the input images. Picklable."""

    # File systems that hold the images: the local one, or those of cloud buckets.
    stores: tuple[pyarrow.fs.FileSystem, ...]
    # For each image, the index of its file system in `stores`, and its unquoted path in that file
    # system (`/folder/image.jpg` or `bucket/folder/image.jpg`).
    paths: tuple[tuple[int, str], ...]


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
    """Detect objects in image files, folders and buckets, with at most one model per GPU.

    If the cluster has no GPU, run at most one model per CPU core.

    Args:
        bundle: Folder of the bundle. Each machine of the cluster needs it at this path.
        sources: Absolute paths, or addresses such as `s3://bucket/folder`; see `stored_images`.
        output: New or empty folder, as an absolute path or an address. Parquet files with
            one row per image are written to it; `SCHEMA` defines their columns.
        options: Options that select the detections to keep.
        precision: Precision of inference. None: the first one that the bundle has for the backend.
        backend: Inference backend.
        max_batch: Maximum number of images in a batch.

    Returns:
        Number of images, and number of images that failed.

    Raises:
        BundleError: The bundle is missing, or its manifest is invalid.
        FileExistsError: `output` is not empty.
        ServingError: There are no images, a bucket is unreachable, the backend or the cluster
            failed, or the number of result rows differs from the number of images.
    """
    read_manifest(bundle)  # reports a missing bundle before Ray starts
    predictor = {
        "bundle": bundle.resolve(),
        "precision": precision,
        "backend": backend,
        "max_batch": max_batch,
    }
    detector = {"options": options, "predictor": predictor}
    with _translated_storage_errors():
        target = _quoted_address(output)
        files, folder = pyarrow.fs.FileSystem.from_uri(target)
        if files.get_file_info(pyarrow.fs.FileSelector(folder, allow_not_found=True)):
            message = "holds files already; choose another folder"
            raise FileExistsError(errno.EEXIST, message, output)
        images = stored_images(sources)
        # Several batches per actor call, so that decoding and inference of batches overlap.
        _write_detections(images, detector, 4 * max_batch, target)
        written = pyarrow.dataset.dataset(folder, filesystem=files)
        return _summary(written, len(images.paths), output)


def stored_images(sources: Sequence[str]) -> StoredImages:
    """Find image files, without duplicates. Folders are searched recursively.

    Args:
        sources: Files and folders, as absolute paths or addresses such as `s3://bucket/folder`.
            A file in `sources` may have any name. In folders, only files with an image suffix are
            used, including hidden files, but not macOS's `._*` files.

    Raises:
        ServingError: A source is missing, or there are no images.
        OSError, pyarrow.ArrowInvalid: A folder or bucket cannot be listed.
        UnicodeEncodeError, UnicodeDecodeError: A name is not UTF-8.
    """
    # The search is recursive, unlike that of `commands.reports.image_files`. Buckets have no real
    # folders, only name prefixes. Results are identified by the whole path of an image, so equal
    # file names do not collide.
    stores: list[pyarrow.fs.FileSystem] = []
    paths: dict[tuple[int, str], None] = {}
    searched = []
    for source in sources:
        files, path = pyarrow.fs.FileSystem.from_uri(_quoted_address(source))
        if files not in stores:
            stores.append(files)
        store = stores.index(files)
        paths |= dict.fromkeys((store, image) for image in _image_paths(files, path))
        searched.append(path)
    if not paths:
        suffixes = ", ".join(sorted(IMAGE_FILE_SUFFIXES))
        raise ServingError(f"no image found in {', '.join(searched)} ({suffixes})")
    return StoredImages(tuple(stores), tuple(paths))


def _quoted_address(source: str) -> str:
    # Arrow would cut an address at `#`, which is part of a name here. Users quote `?` and `%` in
    # names themselves, as `%3F` and `%25`.
    return quote(source, safe=_UNQUOTED) if "://" in source else source


def _image_paths(files: pyarrow.fs.FileSystem, path: str) -> list[str]:
    kind = files.get_file_info(path).type
    if kind is pyarrow.fs.FileType.NotFound:
        raise ServingError(f"no image found: {path} does not exist")
    if kind is not pyarrow.fs.FileType.Directory:
        return [path]
    return sorted(
        info.path
        for info in files.get_file_info(pyarrow.fs.FileSelector(path, recursive=True))
        # Links to missing files, of the type NotFound, get an error later.
        if info.type is not pyarrow.fs.FileType.Directory
        and is_image_file(PurePosixPath(info.path))
    )


def read_image(files: pyarrow.fs.FileSystem, path: str) -> bytes:
    """Return the content of an image file. BMP and TIFF images are converted to PNG.

    Raises:
        ImageError: The file cannot be read, is too large, has an unsupported format, or is a
            BMP or TIFF file that cannot be converted.
    """
    try:
        # Without `compression=None` Arrow would decompress files named *.gz.
        with files.open_input_stream(path, compression=None) as stream:
            size = files.get_file_info(path).size
            if size is None:
                raise ImageError("the path is a pipe or a device, not a file")
            check_file_size(size)
            data: bytes = stream.read()
    except OSError as error:
        raise image_error_from_os_error(error) from None
    return png_from_other_formats(data)


class _RayDetector:
    """Ray actor that loads a model and detects objects in batches of rows, one image per row."""

    def __init__(self, options: DetectionOptions, predictor: dict[str, Any]) -> None:
        self._options = options
        self._predictor = Detector(**predictor)

    def __call__(self, batch: dict[str, Any]) -> pa.Table:
        reads = list(zip(batch["bytes"].tolist(), batch["error"].tolist(), strict=True))
        # Unreadable images never reach the predictor, so `outcomes` has no entries for them.
        images = (data for data, error in reads if not error)
        outcomes = self._predictor.detect_many(images, self._options)
        rows = []
        for path, (_, error) in zip(batch["path"].tolist(), reads, strict=True):
            outcome = error or next(outcomes)
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
    """Read the image file that `row` names. Return a row with keys `path`, `bytes` and `error`.

    The argument `row` has the keys `store`, an index of `stores`, and `path`, a path in that store.
    If reading succeeds, `error` is "". If it fails, `error` is the message and `bytes` is empty.
    """
    path = row["path"]
    try:
        return {"path": path, "bytes": read_image(stores[row["store"]], path), "error": ""}
    except ImageError as error:
        return {"path": path, "bytes": b"", "error": str(error)}


def _summary(written: pyarrow.dataset.Dataset, images: int, output: str) -> RaySummary:
    """Count the images and the failed images in the results.

    Raises:
        ServingError: The number of rows in the results differs from `images`.
    """
    rows = written.count_rows()
    if rows != images:
        raise ServingError(
            f"{output} holds {counted(rows, 'row')} for {counted(images, 'image')}; run again with "
            "an output folder that nothing else writes to"
        )
    return RaySummary(rows, written.count_rows(filter=pyarrow.dataset.field("error").is_valid()))


@contextlib.contextmanager
def _translated_storage_errors() -> Iterator[None]:
    """In the `with` block, convert storage errors to ServingErrors that name a remedy.

    Storage errors are those of pyarrow's file systems, and those for file names that are not UTF-8.
    OSErrors of Python itself, which have a `filename`, are raised unchanged.
    """
    try:
        yield
    except (UnicodeEncodeError, UnicodeDecodeError) as error:
        name = os.fsencode(error.object).decode(errors="backslashreplace")
        raise ServingError(f"the file name {name} is not UTF-8; rename the file") from None
    except (OSError, pa.ArrowInvalid) as error:
        if isinstance(error, OSError) and error.filename is not None:
            raise
        raise ServingError(
            f"cannot access images or results: {error}; if they are in a bucket, check that it "
            "exists (at Amazon S3, or at the server that AWS_ENDPOINT_URL names), and that "
            "AWS_ACCESS_KEY_ID may access it"
        ) from error


def _write_detections(
    images: StoredImages, detector: dict[str, Any], batch_size: int, output: str
) -> None:
    with contextlib.ExitStack() as stack:
        if not ray.is_initialized():  # if the caller has started Ray, it stays up
            try:
                stack.enter_context(ray.init())
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ServingError(
                    f"Ray does not start, or its cluster is not reachable: {error}; check the "
                    "environment variable RAY_ADDRESS"
                ) from error
        try:
            _detections(images, detector, batch_size).write_parquet(output)
        except ray.exceptions.RayError as error:
            # The last line has the cause; the lines before it are tracebacks of the actors.
            cause = str(error).strip().rpartition("\n")[2]
            raise ServingError(f"Ray failed: {cause}") from error


def _detections(
    images: StoredImages, detector: dict[str, Any], batch_size: int
) -> ray.data.Dataset:
    """Return a lazy Ray data set with one row of `SCHEMA` per image.

    Args:
        images: Images to read when the data set is executed.
        detector: Constructor arguments of `_RayDetector`.
        batch_size: Number of rows per call of `_RayDetector`.
    """
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    # At least one core, because machines with cores may join the cluster later.
    gpus, cores = int(resources.get("GPU", 0)), max(1, int(resources.get("CPU", 0)))
    # The files are not read by Ray's own reader, which skips hidden files and stops at unreadable
    # ones.
    rows = ray.data.from_items([{"store": store, "path": path} for store, path in images.paths])
    return rows.map(partial(_with_bytes, images.stores)).map_batches(
        _RayDetector,
        batch_size=batch_size,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=gpus or cores),
        fn_constructor_kwargs=detector,
        num_gpus=1 if gpus else None,
        num_cpus=None if gpus else 1,
        # Without a limit, an image that kills its process would be retried forever.
        max_task_retries=_MAX_RETRIES,
    )
