"""What every accountant is: its interface, its curves, and how it states a guarantee."""
