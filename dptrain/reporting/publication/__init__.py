"""What is published about a run beside the guarantee: facts, and the pages made of all of it."""
