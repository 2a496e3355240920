"""Settings, files, downloads, worker processes, what is printed, and random numbers. Needs no torch."""
