"""The gRPC interface: `maskrcnn/v1/detector.proto` and what `make protos` generates from it."""
