"""``python -m pgqueue`` runs ``pgqueue``."""

from pgqueue.cli import main

if __name__ == "__main__":
    main(prog_name="pgqueue")
