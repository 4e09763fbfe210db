"""Rules: what the gradients of a layer are made of."""
