"""Version 1 of the `maskrcnn.v1.Detector` protocol. `make protos` generates the modules."""
