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

    Inputs and outputs are the tensors of the operation, in its order. The second output, start and
    length of each image's bytes, has one more row here, and must be zero before the launch. The
    last row receives the total length of the messages in its first column.

    Args:
        images: Number of images.
        depth: Number of detections per image.
        text_capacity: Size of the buffer of RLE characters.
        class_table: Shape of the table of class fields.
        capacity: Size of the buffer of messages.
    """
    return Launch((images, 1, 1), (_THREADS, 1, 1), (depth, text_capacity, *class_table, capacity))


PREBUILT_KERNELS = (DETECTION_MESSAGES,)
