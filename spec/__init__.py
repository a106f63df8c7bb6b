"""From YAML text to a checked plan: load, parse, resolve, verify."""
