"""The settings of a run: every section and key, with its type, range and meaning. No torch."""
