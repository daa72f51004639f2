"""Training configurations that ship with the package."""
