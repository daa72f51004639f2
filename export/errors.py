"""Exceptions of the export."""


class EngineError(Exception):
    """An engine cannot be built or inspected on this machine, or fails a check.

    An engine is a TensorRT engine or a torch program that is compiled for a GPU.
    """


class VerificationError(Exception):
    """An exported file does not reproduce the checkpoint's detections."""
