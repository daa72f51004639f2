"""Inference over gRPC: the server of exported bundles, its clients, and offline prediction."""

# Parent of all loggers of serving. Its level applies to the server and to its worker processes.
LOGGER = __name__
