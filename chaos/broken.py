"""How a scenario fails."""


class Broken(AssertionError):
    """A promise was broken; the message says which, and by which job."""
