"""Processing steps from image files to detections, on the CPU and on the GPU."""
