"""Protocols by name."""
