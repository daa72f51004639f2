"""Serving: from a bundle to detections over gRPC."""
