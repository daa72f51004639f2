"""Request pipeline of the server: admission, decoding, scheduling, batching, inference."""
