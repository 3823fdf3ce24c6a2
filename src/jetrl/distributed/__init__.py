"""The processes of one run: shared decisions, shares of work, and shards of weights."""
