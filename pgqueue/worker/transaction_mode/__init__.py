"""Transaction mode: claims, runs the handler and settles in one transaction."""
