"""The dashboard in a Flask application: one route for all pages, in the application's requests."""

from typing import Protocol

from flask import Blueprint, Response, request
from werkzeug import Request
from werkzeug import Response as Answered

__all__ = ["Blueprint", "blueprint"]


class Answer(Protocol):
    """``Dashboard.answer``."""

    def __call__(self, request: Request, *, root: str, path: str) -> Answered: ...


def blueprint(answer: Answer, name: str, url_prefix: str) -> Blueprint:
    """A blueprint whose requests are answered by a dashboard, in the application's context."""
    made = Blueprint(name, __name__, url_prefix=url_prefix)

    @made.route("/", defaults={"path": ""}, methods=["GET", "POST"])
    @made.route("/<path:path>", methods=["GET", "POST"])
    def page(path: str) -> Response:
        address = request.root_path.rstrip("/") + request.path
        root = address.removesuffix(path).rstrip("/")
        answered = answer(request, root=root, path=f"/{path}")
        return Response(answered.response, answered.status, answered.headers)

    return made
