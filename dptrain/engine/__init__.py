"""The privacy engine: from a module, an optimizer and a loader to a private run."""
