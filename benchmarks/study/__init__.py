"""Studies: runs of several arms and seeds, side by side over the cards, and one report."""
