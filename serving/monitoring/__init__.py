"""What operators see of the server: metrics, logs and traces."""
