"""Detection without a server: of an image, of many, and on many machines."""
