"""Measurements: throughput, latency, and records of both."""
