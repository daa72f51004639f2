"""Inference with exported models: gRPC and HTTP server, Python clients, offline prediction."""

# Name of the parent logger of all loggers in `serving`. Its level applies to the server and to the
# server's worker processes.
LOGGER = __name__
