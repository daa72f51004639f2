"""Bundles (folders with exported models): manifest, inputs and outputs, torch programs."""
