"""What every way of clipping shares: rows, norms, styles, factors."""
