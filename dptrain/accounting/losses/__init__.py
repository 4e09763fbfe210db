"""Privacy losses of Gaussians and their mixtures, and their composition."""
