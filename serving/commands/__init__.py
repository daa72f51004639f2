"""Commands `serve`, `predict` and `client`, and the checks of `serve --doctor`."""
