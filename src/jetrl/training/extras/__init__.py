"""Extras of training: the critic, reward models, calibrated clipping and Shuffle-R1."""
