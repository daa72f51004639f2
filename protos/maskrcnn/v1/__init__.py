"""Version 1 of the detector's protocol; `make protos` generates the modules."""
