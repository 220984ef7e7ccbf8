"""Output for people: tables, sentences, progress, HTML pages."""
