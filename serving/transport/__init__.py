"""How calls reach the server: connections, who may call, limits, streams, health."""
