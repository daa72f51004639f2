"""What can go wrong with engines."""


class EngineError(Exception):
    """An engine cannot be built or inspected here, or is not what it should be."""
