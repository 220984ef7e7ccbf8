"""Which candidate is the fastest: search, races, finals, ranking."""
