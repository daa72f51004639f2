"""gRPC transport: access control, concurrency limits, slow clients, message validation."""
