"""A YAML sweep spec: read it, check it, resolve it."""
