"""Transaction mode: claim, handler and settle in one transaction."""
