"""The user: the rights here, and how the pages look."""

from pgqueue.dashboard.access import RIGHTS
from pgqueue.dashboard.routing import Done, Page, Refused, Request, Route

CHOICES = {"theme": ("system", "light", "dark"), "live": ("on", "off")}


def you(request: Request) -> Page:
    """The rights of the user, as ``authorize`` has given them."""
    return Page("you.html", title=f"You are {request.access.user}", rights=sorted(RIGHTS))


def choose(request: Request) -> Done:
    """Keep a choice of the user in a cookie: the theme, or whether pages refresh themselves."""
    cookies = {}
    for name, choices in CHOICES.items():
        if choice := request.posted(name):
            if choice not in choices:
                raise Refused(f"{name} is {choice!r}; give one of {', '.join(choices)}")
            cookies[f"pgqueue_{name}"] = choice
    return Done("", to=request.back(), cookies=cookies)


ROUTES = [Route("/you", you), Route("/you/choose", choose, method="POST")]
