"""What several test modules use: small models, files and runs."""
