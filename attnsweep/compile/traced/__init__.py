"""Calls the user's launchers on tensors without memory, without a GPU, and notes each launch."""
