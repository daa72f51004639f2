"""Sync and async Python clients of the gRPC server."""

from .connection import Credentials
from .detector_client import AsyncDetectorClient, DetectorClient

__all__ = ["AsyncDetectorClient", "Credentials", "DetectorClient"]
