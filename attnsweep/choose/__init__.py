"""Which candidate is fastest: what to try, races, finals, ranking."""
