"""Sync and async Python clients of the gRPC server."""

from .async_detector_client import AsyncDetectorClient
from .connection import Credentials
from .detector_client import DetectorClient

__all__ = ["AsyncDetectorClient", "Credentials", "DetectorClient"]
