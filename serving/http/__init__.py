"""HTTP API: Open Inference Protocol v2 over REST, `/v1/detect`, and the page for browsers."""
