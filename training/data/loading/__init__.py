"""Load batches: sampling, decoding, augmentation and prefetching to the GPU."""
