"""Inference with exported models: gRPC and HTTP server, Python clients, offline prediction."""

# Parent of all loggers of serving. Its level applies to the server and to its worker processes.
LOGGER = __name__
