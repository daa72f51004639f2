"""Protocol Buffers of the gRPC services, and the code that `make protos` generates from them."""
