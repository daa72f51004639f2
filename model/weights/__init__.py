"""Weights of other implementations: read without running code, renamed, and loaded or converted.

Each origin has a module that says how its files are recognised, what its tensors are called here,
how their layout differs, and by which conventions it computes.
"""
