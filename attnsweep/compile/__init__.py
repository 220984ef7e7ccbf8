"""From a config to compiled and analysed stages, and their numerical limits; needs no GPU."""
