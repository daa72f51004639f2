"""Model configuration: schema, command-line overrides, strict YAML and error messages."""
