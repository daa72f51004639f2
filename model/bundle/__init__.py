"""Bundle format: manifest, specification of inputs and outputs, torch programs."""
