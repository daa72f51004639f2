"""TensorRT plugins that run this package's CUDA kernels."""
