"""Open Inference Protocol v2 with extensions of Triton."""
