"""The steps from encoded images to detections, on the CPU or on a GPU."""
