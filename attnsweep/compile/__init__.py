"""Compiles and analyses a config's stages, and finds their limits of error; needs no GPU."""
