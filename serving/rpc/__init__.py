"""gRPC transport: services, access control, limits, message validation, front-end processes."""
