"""Batches for training and evaluation, read ahead by worker processes."""

import logging
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import DataLoader

from ..config import DataConfig, TrainConfig
from .batches import Batch, EncodedBatch
from .coco import CocoDataset, DataError
from .reading import BatchReader
from .sampling import BatchPlan, GlobalBatches, TrainSampler, eval_plans

logger = logging.getLogger(__name__)


class BatchLoader:
    """Batches in the order of their plans; files left out are named in warnings."""

    def __init__(
        self,
        reader: BatchReader,
        plans: TrainSampler | list[BatchPlan],
        config: DataConfig,
        *,
        pin_memory: bool,
    ) -> None:
        self._length = len(plans)
        self._skipped: set[str] = set()
        self._batches: DataLoader[Batch | EncodedBatch | DataError] = DataLoader(
            reader,
            sampler=plans,
            batch_size=None,
            num_workers=config.workers,
            pin_memory=pin_memory,
            worker_init_fn=_initialise_worker,
            # Of its own: the loader draws a number at every start, and what it takes from the
            # global generator would make a resumed run differ from an uninterrupted one.
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Batch | EncodedBatch]:
        """Yield batches.

        Raises:
            DataError: a broken file where these are refused, or a worker process that died.
        """
        try:
            for batch in self._batches:
                if isinstance(batch, DataError):
                    raise batch
                self._warn_of(batch.skipped)
                if len(batch.image_ids):
                    yield batch
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):
                raise
            raise DataError(
                "a process that reads images died, most likely for want of memory; lower "
                "data.workers, or give the machine more memory (in a container, --shm-size)"
            ) from error

    def _warn_of(self, reasons: Sequence[str]) -> None:
        for reason in reasons:
            if reason not in self._skipped:
                self._skipped.add(reason)
                logger.warning("left out %s (broken files so far: %d)", reason, len(self._skipped))


class TrainLoader(BatchLoader):
    """Training batches.

    Attributes:
        iterations_per_epoch: steps in which every image is seen once.
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
    """This rank's training batches from an iteration to the last.

    Yields `solver.accumulate` batches for every iteration, one after the other.

    Raises:
        DataError: nothing to train on, or a batch size that does not divide.
    """
    solver = config.solver
    if solver.images_per_batch % (world_size * solver.accumulate):
        raise DataError(
            f"solver.images_per_batch {solver.images_per_batch} does not divide by {world_size} "
            f"ranks times solver.accumulate {solver.accumulate}"
        )
    reader = BatchReader(
        dataset,
        config.data,
        config.seed,
        training=True,
        mask_crop_size=config.model.roi.mask_crop_size,
    )
    batches = GlobalBatches(reader.buckets, solver.images_per_batch, config.seed)
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
    rank: int = 0,
    world_size: int = 1,
    pin_memory: bool = False,
) -> BatchLoader:
    """This rank's share of an evaluation: over all ranks every image once, without targets."""
    reader = BatchReader(dataset, config.data, config.seed, training=False)
    plans = eval_plans(
        reader.buckets, config.evaluation.images_per_batch, rank=rank, world_size=world_size
    )
    return BatchLoader(reader, plans, config.data, pin_memory=pin_memory)


def _initialise_worker(_: int) -> None:
    # Workers are the parallelism; threads inside them would only fight over the same cores.
    torch.set_num_threads(1)
