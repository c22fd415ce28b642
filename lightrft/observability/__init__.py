"""Reports of a run about itself: metrics, timers, trackers, run directory, progress bar."""
