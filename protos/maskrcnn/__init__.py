"""Code generated from the gRPC protocol `maskrcnn`, one package per protocol version."""
