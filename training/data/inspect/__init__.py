"""Inspect data sets: statistics, invalid entries and suspicious annotations."""
