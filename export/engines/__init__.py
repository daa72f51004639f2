"""TensorRT and TensorRT-RTX engines: building, options and inspection."""
