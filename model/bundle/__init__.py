"""Format of bundles (folders with exported models), and execution of their torch programs."""
