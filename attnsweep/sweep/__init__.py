"""Several cards for one sweep: whole problems are handed to child processes, one for each card."""
