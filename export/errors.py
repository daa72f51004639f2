"""Exceptions of the export."""


class EngineError(Exception):
    """A TensorRT engine cannot be built or inspected on this machine, or fails a check."""


class VerificationError(Exception):
    """An exported file does not reproduce the checkpoint's detections."""
