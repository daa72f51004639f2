"""Detection without a server: in one image, in many images, or on many machines with Ray."""
