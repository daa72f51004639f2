"""TensorRT plugins made of the CUDA kernels."""
