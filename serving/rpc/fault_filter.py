"""Filter for log records of the gRPC library."""

import logging

import grpc


def drop_client_faults() -> None:
    """Filter out gRPC's log records about disconnected clients and undecodable metadata."""
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_server_fault)


def _is_server_fault(record: logging.LogRecord) -> bool:
    # The message of UnicodeDecodeError would quote the metadata, which can be a token.
    client_faults = grpc.aio.InternalError, UnicodeDecodeError
    return record.exc_info is None or not isinstance(record.exc_info[1], client_faults)
