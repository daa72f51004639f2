"""The Open Inference Protocol v2, with Triton's calls, over the same pipeline as our own."""
