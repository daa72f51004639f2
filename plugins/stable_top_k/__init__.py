"""`maskrcnn::stable_top_k`: top k with ties broken by the lower index."""

from .operation import stable_top_k

__all__ = ["stable_top_k"]
