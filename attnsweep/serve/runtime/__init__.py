"""The code of an exported package: copied as it is, it imports torch and cuda.bindings alone."""
