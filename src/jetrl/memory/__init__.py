"""Memory planning, before anything is loaded, and measurement during a run."""
