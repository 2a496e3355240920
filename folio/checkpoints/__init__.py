"""What a run leaves on disk, found, written and read, and the formats of other programs."""
