"""Prometheus endpoint: metrics of requests, model, event loop, CPU and GPUs."""
