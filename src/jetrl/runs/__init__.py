"""Records of a run and their displays: directory, metrics, console, report, trackers."""
