"""`maskrcnn::stable_top_k` and `top_k_of_parts`: top k with ties broken by the lower index."""

from .operation import stable_top_k, top_k_of_parts, top_k_of_parts_in_torch

__all__ = ["stable_top_k", "top_k_of_parts", "top_k_of_parts_in_torch"]
