"""The card, without attention: memory, launches, graphs, locks, energy."""
