"""Facts that are published about a run beside the guarantee, and the pages made of all of it."""
