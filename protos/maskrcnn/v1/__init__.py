"""gRPC service `maskrcnn.v1.Detector`. `make protos` generates the modules of this package."""
