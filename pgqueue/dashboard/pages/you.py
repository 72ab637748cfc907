"""The user: the rights here, and how the pages look."""

from pgqueue.dashboard.access import RIGHTS
from pgqueue.dashboard.routing import Asked, Done, Page, Refused, Route

CHOICES = {"theme": ("system", "light", "dark"), "live": ("on", "off")}


def you(asked: Asked) -> Page:
    """The rights of the user, as ``authorize`` has given them."""
    return Page("you.html", title=f"You are {asked.access.user}", rights=sorted(RIGHTS))


def choose(asked: Asked) -> Done:
    """Keep a choice of the user in a cookie: the theme, or whether pages refresh themselves."""
    cookies = {}
    for name, choices in CHOICES.items():
        if choice := asked.posted(name):
            if choice not in choices:
                raise Refused(f"{name} is {choice!r}; give one of {', '.join(choices)}")
            cookies[f"pgqueue_{name}"] = choice
    return Done("", to=asked.back(), cookies=cookies)


ROUTES = [Route("/you", you), Route("/you/choose", choose, method="POST")]
