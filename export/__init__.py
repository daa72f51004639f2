"""Export of a checkpoint to a bundle, the folder of model files that a server loads."""
