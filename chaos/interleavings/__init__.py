"""Every order of the statements of a few sessions."""
