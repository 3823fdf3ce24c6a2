"""Everything that several processes of one run do together; today a run is one process."""
