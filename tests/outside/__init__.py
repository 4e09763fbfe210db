"""What a package of somebody else's can bring to dptrain, without a line of dptrain changed."""
