"""Monitoring: metrics, logs and traces that the server records."""
