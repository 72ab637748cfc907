"""What a claim takes, and when."""
