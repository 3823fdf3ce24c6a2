"""The memory of a run: planned before anything is loaded, and measured during the run."""
