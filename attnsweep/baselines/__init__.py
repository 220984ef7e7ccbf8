"""What candidates are compared with."""
