"""Engines, which compute batches of images with a loaded model, and their worker processes."""
