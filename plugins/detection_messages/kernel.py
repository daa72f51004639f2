"""Compilation and launch of `detection_messages.cu`."""

from ..runtime.compilation import Kernel, Launch

# Threads per block.
_THREADS = 1024

DETECTION_MESSAGES = Kernel(
    "detection_messages/detection_messages.cu", "detection_messages", (("THREADS", _THREADS),)
)


def detection_messages_launch(
    images: int, depth: int, text_capacity: int, class_table: tuple[int, int], capacity: int
) -> Launch:
    """Return the grid, block and scalar arguments of the kernel `DETECTION_MESSAGES`.

    Inputs are the fields of `DetectionBatch`, then those of `ClassTable`. Outputs are a buffer of
    messages, [capacity] uint8, and the start and length of each image's message in this buffer,
    [images + 1, 2] int64. The second output must be zero before the launch. The first entry of its
    last row receives the total length of all messages.

    Args:
        images: Number of images.
        depth: Number of detections per image.
        text_capacity: Size of the buffer of RLE characters.
        class_table: Shape [L, F] of `ClassTable.fields`: L classes, F bytes per class.
        capacity: Size of the buffer of messages.
    """
    return Launch((images, 1, 1), (_THREADS, 1, 1), (depth, text_capacity, *class_table, capacity))


PREBUILT_KERNELS = (DETECTION_MESSAGES,)
