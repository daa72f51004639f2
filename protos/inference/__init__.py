"""Generated gRPC code of the Open Inference Protocol v2 with Triton's extensions."""
