"""Engines, which compute batches: on a device or not, each in a process of its own."""
