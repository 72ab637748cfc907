"""Applications to read and run; see README.md beside this file."""
