"""Export: from a checkpoint to a bundle that a server loads."""
