"""Inference backends, one module per runtime, behind the interface `base.Backend`."""
