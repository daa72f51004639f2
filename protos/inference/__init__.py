"""The Open Inference Protocol v2, with what Triton adds to it."""
