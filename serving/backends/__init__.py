"""What computes detections: one module a runtime, all behind `base.Backend`."""
