"""What releases give away by their numbers: on the grid nothing, in floating point much."""
