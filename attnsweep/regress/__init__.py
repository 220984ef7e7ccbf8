"""Whether a kernel got slower: code against code, and run against run."""
