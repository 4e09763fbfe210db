"""What single examples have spent, from their gradient norms."""
