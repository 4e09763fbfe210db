"""One private run on several processes."""
