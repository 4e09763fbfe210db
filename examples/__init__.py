"""Whole programs to copy. A package, as Opacus installs another one of this name."""
