"""Inference with exported models: gRPC and HTTP server, Python clients, offline prediction."""

# Name of the parent of all loggers of serving. The parent's level applies to the server and to its
# worker processes.
LOGGER = __name__
