"""Export to a torch program with fused operations."""
