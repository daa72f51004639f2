"""Presets: training configurations (YAML files) included in the package."""
