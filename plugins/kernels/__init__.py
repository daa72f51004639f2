"""CUDA sources of the custom operations, free of framework headers."""
