"""Commands `serve`, `predict`, `client`, `health` and `doctor`."""
