"""Versions of the `maskrcnn` protocol."""
