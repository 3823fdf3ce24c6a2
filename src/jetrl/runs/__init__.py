"""The records of a run and its displays: directory, metrics, console, report, trackers."""
