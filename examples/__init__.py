"""Example applications.  README.md in this directory describes them."""
