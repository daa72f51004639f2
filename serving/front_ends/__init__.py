"""Front-end processes, which share the gRPC port and pass calls to the server's process."""
