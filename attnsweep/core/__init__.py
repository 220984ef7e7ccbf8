"""Values of all rooms."""
