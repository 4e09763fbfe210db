"""What the site is made of besides its texts: everything that is generated from the code."""
