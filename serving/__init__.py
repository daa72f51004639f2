"""Serving: from a bundle to detections over gRPC."""

LOGGER = __name__
"""Above all loggers of serving: its level is the server's and its engines'."""
