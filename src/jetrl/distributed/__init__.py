"""What several processes of one run have to do together; today a run is one process."""
