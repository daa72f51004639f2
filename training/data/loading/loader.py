"""Data loaders for training and evaluation."""

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import TracebackType

import torch
from torch.utils.data import DataLoader

from ...config import DataConfig, TrainConfig
from ..coco.dataset import CocoDataset, DataError
from .batch_reader import BatchReader
from .batches import Batch, EncodedBatch
from .sampling import BatchPlan, GlobalBatches, TrainSampler, eval_plans

logger = logging.getLogger(__name__)


class BatchLoader:
    """Iterable over batches. Each batch has the images that a `BatchPlan` lists.

    `BatchReader` omits or replaces unreadable images. This class logs the unreadable images, and
    skips batches without a readable image.
    """

    def __init__(
        self,
        reader: BatchReader,
        plans: TrainSampler | list[BatchPlan],
        config: DataConfig,
        *,
        pin_memory: bool,
    ) -> None:
        self._length = len(plans)
        self._images = len(reader.records)
        self._skipped: set[str] = set()
        self._batches: DataLoader[Batch | EncodedBatch | DataError] = DataLoader(
            reader,
            sampler=plans,
            batch_size=None,
            num_workers=config.workers,
            # Forked workers share the data set's memory, and need not import torch. The default
            # start method varies with the version of Python and with how this process was started.
            multiprocessing_context="fork" if config.workers else None,
            pin_memory=pin_memory,
            worker_init_fn=initialise_worker,
            # DataLoader draws a random number whenever an iteration over it starts. With the global
            # generator, a resumed run would therefore differ from an uninterrupted one.
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch | EncodedBatch]:
        """Yield the batches that contain at least one readable image.

        Raises:
            DataError: A file is unreadable and `data.on_broken` is "refuse", all training images of
                a shape bucket (input size) are unreadable, or a data-loading process died.
        """
        try:
            for batch in self._start():
                if isinstance(batch, DataError):
                    raise batch
                self._log_skipped(batch.skipped)
                if len(batch.image_ids):
                    yield batch
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            raise DataError(
                "a data-loading worker died, probably because memory ran out; lower data.workers, "
                "or add memory (in a container, raise --shm-size)"
            ) from error

    def _start(self) -> Iterator[Batch | EncodedBatch | DataError]:
        """Start the data-loading processes, and return an iterator over their batches."""
        handler = signal.getsignal(signal.SIGCHLD)
        batches = iter(self._batches)
        # For the first `DataLoader` of a process, torch installs a handler that raises an error as
        # soon as a data-loading process dies, even in the middle of an optimiser step. Without this
        # handler, the iterator raises the error when the next batch of that process is due.
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and handler is not None:
            signal.signal(signal.SIGCHLD, handler)
        return batches

    def _log_skipped(self, reasons: Sequence[str]) -> None:
        for reason in reasons:
            if reason not in self._skipped:
                self._skipped.add(reason)
                logger.warning("skipped %s (skipped files so far: %d)", reason, len(self._skipped))

    def warn_of_skipped(self) -> None:
        """Log a warning with the number of image files that could not be read, if any."""
        if self._skipped:
            logger.warning(
                "reading failed at least once for %d of %d images; other images replaced them. The "
                "warnings above name the files",
                len(self._skipped),
                self._images,
            )


class TrainLoader(BatchLoader):
    """Iterable over the training batches of one rank.

    Attributes:
        iterations_per_epoch: Number of iterations per epoch. An epoch uses each image once, unless
            `data.extra_train` or `data.repeat_threshold` repeats or omits images.
    """

    def __init__(
        self,
        reader: BatchReader,
        batches: GlobalBatches,
        sampler: TrainSampler,
        config: DataConfig,
        *,
        pin_memory: bool,
    ) -> None:
        super().__init__(reader, sampler, config, pin_memory=pin_memory)
        self.iterations_per_epoch = batches.batches_per_epoch


def train_loader(
    dataset: CocoDataset,
    config: TrainConfig,
    *,
    first_iteration: int = 0,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
) -> TrainLoader:
    """Create the loader of one rank's training batches, from `first_iteration` to the run's end.

    The loader yields `solver.accumulate` batches per iteration.

    Raises:
        DataError: There is no image to train on, or `solver.images_per_batch` is not divisible by
            the number of ranks times `solver.accumulate`.
    """
    solver = config.solver
    if solver.images_per_batch % (world_size * solver.accumulate):
        raise DataError(
            f"solver.images_per_batch {solver.images_per_batch} is not divisible by {world_size} "
            f"ranks times solver.accumulate {solver.accumulate}; change one of the two settings"
        )
    reader = BatchReader(
        dataset,
        config.data,
        config.seed,
        training=True,
        mask_crop_size=config.model.roi.mask_crop_size,
    )
    batches = GlobalBatches(
        reader.buckets,
        solver.images_per_batch,
        config.seed,
        # None: each image occurs once per epoch.
        None if (reader.repeat_factors == 1).all() else reader.repeat_factors,
    )
    sampler = TrainSampler(
        batches,
        range(first_iteration, solver.max_iterations),
        parts=solver.accumulate,
        rank=rank,
        world_size=world_size,
    )
    return TrainLoader(reader, batches, sampler, config.data, pin_memory=pin_memory)


def eval_loader(
    dataset: CocoDataset,
    config: TrainConfig,
    *,
    ground_truth: bool = False,
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
) -> BatchLoader:
    """Create the loader of one rank's evaluation batches, without augmentation.

    Each image of the data set is loaded by exactly one rank. If `ground_truth` is True, batches
    include the ground truth, from which losses can be computed.
    """
    reader = BatchReader(
        dataset,
        config.data,
        config.seed,
        training=False,
        ground_truth=ground_truth,
        mask_crop_size=config.model.roi.mask_crop_size,
    )
    plans = eval_plans(
        reader.buckets, config.evaluation.images_per_batch, rank=rank, world_size=world_size
    )
    return BatchLoader(reader, plans, config.data, pin_memory=pin_memory)


def initialise_worker(_: int) -> None:
    """Initialise a worker process of a `DataLoader`.

    Limit torch to one thread. Ignore SIGINT. End on SIGTERM only if the parent sent it. Print no
    traceback if the connection to the parent breaks.
    """
    # More threads would compete for the CPU cores that the worker processes already use.
    torch.set_num_threads(1)
    # Ctrl+C reaches all processes of a terminal, and `timeout`, systemd and Slurm send SIGTERM to
    # all processes of a job. The worker must survive both signals, because the main process still
    # needs batches for its last step. The worker ends when the main process itself sends SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # If the main process ends while it receives a batch, multiprocessing's thread in this process
    # would print a traceback.
    sys.excepthook = _print_unless_disconnected
    threading.Thread(target=_end_with_sigterm_of, args=(os.getppid(),), daemon=True).start()


def _print_unless_disconnected(
    kind: type[BaseException], error: BaseException, traceback: TracebackType | None
) -> None:
    if not isinstance(error, (ConnectionError, EOFError)):
        sys.__excepthook__(kind, error, traceback)


def _end_with_sigterm_of(parent: int) -> None:
    """Wait for SIGTERM from the parent process, and then end this process.

    `parent` is the id of the parent process. SIGTERM from other processes is ignored.
    """
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
