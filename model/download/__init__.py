"""Resumable downloads over HTTP, with checksums and progress bars."""
