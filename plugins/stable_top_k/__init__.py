"""`maskrcnn::stable_top_k` and `top_k_of_parts`: k largest entries of rows or of parts of rows."""

from .operation import stable_top_k, top_k_of_parts, top_k_of_parts_in_torch

__all__ = ["stable_top_k", "top_k_of_parts", "top_k_of_parts_in_torch"]
