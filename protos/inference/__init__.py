"""Code for the gRPC service of the Open Inference Protocol v2, with extensions of Triton."""
