"""What the server does with one request: decode, queue, infer, encode."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from contextvars import Context
from pathlib import Path

from ..model.manifest import read_manifest
from .admission import Places
from .batching import LONGEST_START_S
from .config import ServeConfig
from .daemon_threads import in_daemon_thread
from .detections import Answer, DetectionOptions, Detections, Timing, Value
from .engines.host_work import answer_from_result, is_quick, item_from_image
from .errors import BackendError, ExpiredError, QueueFullError, ServingError
from .image_threads import ImageThreads, timed
from .models import ServedModel
from .monitoring.telemetry import Telemetry
from .scheduling import RequestTerms
from .steps.preprocessing import SourceImage

_log = logging.getLogger(__name__)

_LEAST_BATCHES, _LEAST_PLACES = 2, 16
"""Places that there are however slow the model is: for one batch to be ready when another is done,
and for a client that asks for a few images at once."""


class Pipeline:
    """Takes many requests at once, which are answered while `running` is entered."""

    def __init__(
        self, bundle: Path, config: ServeConfig, telemetry: Telemetry | None = None
    ) -> None:
        """Take a bundle, whose model is to be loaded first; raises as `ServedModel` does.

        Args:
            bundle: Folder that export wrote.
            config: How to serve it.
            telemetry: What watches requests; none, one of its own.
        """
        self.model = ServedModel(bundle, config)
        """What serves requests that come now."""
        self.telemetry = telemetry or Telemetry()
        """What watches them."""
        self._bundle = bundle
        self._config = config
        self.places = Places(
            config.queue_size,
            config.max_wait_s,
            least=max(_LEAST_PLACES, _LEAST_BATCHES * config.max_batch),
        )
        """Those of images in progress, of which who has one detected holds one."""
        self.threads = ImageThreads(config.threads)
        """Those that work on images."""
        self._changing = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Compute what `detect` is asked for within the context."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            self._computing = tasks.create_task(self.model.run())
            try:
                yield
            finally:
                async with self._changing:  # which needs the tasks until it is done
                    self._computing.cancel()

    def stored_name(self) -> str:
        """Name of the model that `reload` would load.

        Raises:
            BundleError: the bundle is missing.
        """
        return read_manifest(self._bundle).model_name

    async def reload(self) -> None:
        """Load the bundle anew, and serve it in place of the old one once it is warm.

        Requests go on meanwhile, and end with the model that they began with, which is then
        released. If it fails, the old one serves on, or stays unloaded. To be called while
        `running`.

        Raises:
            BundleError: the bundle is missing, damaged or lacks a precision.
            BackendError: a backend does not run, not beside the old one, or is not ready in ten
                minutes for each precision.
        """
        async with self._changing:
            try:
                model = await self._loaded_in_time()
            except Exception as error:
                _log.error(
                    "the bundle is not reloaded, and the old one %s: %s",
                    "stays unloaded" if self.model.is_unloaded else "serves on",
                    error,
                )
                raise
            released = self._released()
            self.model = model
            # In no context, as it would go on in that of the request that asked for this.
            self._computing = self._tasks.create_task(model.run(), context=Context())
            _log.info("the bundle is reloaded: %s", model.manifest.model_name)
            await released

    async def unload(self) -> None:
        """Take no more requests, and release the model when those in progress are answered.

        To be called while `running`; `reload` serves again.
        """
        async with self._changing:
            self.model.is_unloaded = True
            await self._released()
            _log.info("the model is unloaded: %s", self.model.manifest.model_name)

    async def _loaded_in_time(self) -> ServedModel:
        """The model that the bundle now has, or an error where a disk or a driver hangs."""
        limit_s = LONGEST_START_S * max(1, len(self._config.precision))
        with self.telemetry.metrics.reloading():
            late = (
                f"the model is not ready after {limit_s:g} s, and is given up; see whether the "
                "bundle's disk and `nvidia-smi` answer, and load it again"
            )
            async with _time_limit(limit_s, lambda: BackendError(late)):
                return await self._loaded()

    async def _loaded(self) -> ServedModel:
        """The model that the bundle now has, warm."""
        model = await in_daemon_thread(ServedModel, self._bundle, self._config)
        try:
            await model.load()
            await model.warm_up()
        except BaseException:
            await in_daemon_thread(model.close)
            raise
        return model

    def _released(self) -> asyncio.Future[None]:
        """The end of what is now the model; it comes also when nobody waits for it any more."""
        end = _end(self.model, self._computing)
        return asyncio.shield(self._tasks.create_task(end, context=Context()))

    @property
    def stream_window(self) -> int:
        """Images of a stream to be in progress: those of all batches that overlap, and one more."""
        return (self.model.batcher().concurrency + 1) * self._config.max_batch

    def close(self) -> None:
        """Release threads and model."""
        self.threads.close()
        self.model.close()

    def check_place(self, peer: str) -> None:
        """Refuse a request of a connection that would find no place, before it is read.

        It counts as one for the model.

        Raises:
            QueueFullError: there is none.
        """
        try:
            self.places.check(peer)
        except QueueFullError as error:
            name = self.model.manifest.model_name
            self.telemetry.metrics.count_failure(name, error, elapsed_s=0)
            raise

    def time_limit(self, timeout_s: float | None) -> AbstractAsyncContextManager[None]:
        """Give up what is within the context when its request has taken as long as it may.

        Args:
            timeout_s: The longest that the request wants to take; the server's limit holds, too.

        Raises:
            ExpiredError: it took longer.
        """
        limits = [s for s in (timeout_s, self._config.timeout_s) if s is not None]
        limit_s = min(limits, default=None)
        return _time_limit(
            limit_s,
            lambda: ExpiredError(
                f"the request took longer than its {limit_s:g} s; ask for more with its "
                "timeout_us or timeout, raise the server's timeout_s, or send less at once"
            ),
        )

    async def detect(
        self,
        source: SourceImage,
        options: DetectionOptions,
        form: Callable[[Detections], Value],
        terms: RequestTerms,
        model: ServedModel,
    ) -> Answer[Value]:
        """Detect in an image.

        If the caller is cancelled, the image leaves the queue at once.

        Args:
            source: The image.
            options: What to answer with.
            form: Makes the answer of the detections, where the masks are encoded; a function of a
                module, since that may be another process.
            terms: How to compute it, but for its timeout, which is for the caller to keep.
            model: The one to detect with, which the caller uses.

        Raises:
            ImageError: the image cannot be used.
            InvalidRequestError: the precision is not served.
            BackendDownError: the model broke and is not there again yet.
            BackendError: it failed on the batch that the image was in.
        """
        watch = self.telemetry.image(
            model.manifest.model_name, terms.precision or model.precisions[0]
        )
        with watch as answered:
            detecting = self._detect(model, source, options, form, terms)
            del source  # which can be large, and may be gone while it waits for a batch
            answer = await detecting
            answered(answer.timing)
            return answer

    async def _detect(
        self,
        model: ServedModel,
        source: SourceImage,
        options: DetectionOptions,
        form: Callable[[Detections], Value],
        terms: RequestTerms,
    ) -> Answer[Value]:
        batcher = model.batcher(terms.precision)
        image = source, options, form, model.manifest, batcher.info, self._config.max_pixels
        if is_quick(source, batcher.info):
            decoded = timed(item_from_image, *image)
        else:
            decoded = await self.threads.run(terms.peer, item_from_image, *image)
        del image, source
        result = await batcher.infer(decoded.value, terms)
        found = result.value, decoded.value, options, form, model.manifest
        if batcher.info.takes_orders:  # it has answered already, and a thread would only take time
            encoded = timed(answer_from_result, *found)
        else:
            encoded = await self.threads.run(terms.peer, answer_from_result, *found)
        inferred_s = result.infer_s / result.batch_size / batcher.concurrency
        worked_s = (decoded.worked_s + encoded.worked_s) / self.threads.number
        self.places.observe(max(inferred_s, worked_s))
        value, in_engine = encoded.value
        timing = Timing(
            decode_us=_microseconds(decoded.worked_s) + in_engine.decode_us,
            queue_us=_microseconds(decoded.waited_s + result.queue_s + encoded.waited_s),
            infer_us=in_engine.infer_us or _microseconds(result.infer_s),
            encode_us=_microseconds(encoded.worked_s) + in_engine.encode_us,
            batch_size=result.batch_size,
        )
        return Answer(value, timing)


@contextlib.asynccontextmanager
async def _time_limit(
    limit_s: float | None, late: Callable[[], ServingError]
) -> AsyncIterator[None]:
    """Raise an error of ours in place of what takes longer within the context; None is no limit."""
    try:
        async with asyncio.timeout(limit_s) as limit:
            yield
    except TimeoutError:
        if not limit.expired():
            raise
        raise late() from None


async def _end(model: ServedModel, computing: asyncio.Task[None]) -> None:
    """Let a model answer those that use it, and release it."""
    try:
        await model.unused()
    finally:
        computing.cancel()
        await asyncio.wait([computing])
        await in_daemon_thread(model.close)


def _microseconds(seconds: float) -> int:
    return round(seconds * 1e6)
