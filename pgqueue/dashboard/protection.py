"""What keeps other sites from acting in a user's name, and pages from running foreign scripts."""

from itsdangerous import BadSignature, URLSafeTimedSerializer
from werkzeug import Request

FORM_AGE = 2 * 3600
"""Seconds for which a form can be sent after it was shown."""
MESSAGE_AGE = 60
LARGEST_BODY = 256 * 1024

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    # With no-referrer, browsers send forms over plain HTTP with `Origin: null`.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
}


class Tokens:
    """Signed texts in forms and addresses: no cookie and no session is needed."""

    def __init__(self, secret: str) -> None:
        self._forms = URLSafeTimedSerializer(secret, salt="pgqueue.dashboard.form")
        self._messages = URLSafeTimedSerializer(secret, salt="pgqueue.dashboard.message")

    def form(self, user: str) -> str:
        """The token of a form that is shown to this user."""
        return str(self._forms.dumps(user))

    def is_form(self, token: str, user: str) -> bool:
        """Whether a form with this token was shown to this user within two hours."""
        try:
            return bool(self._forms.loads(token, max_age=FORM_AGE) == user)
        except BadSignature:
            return False

    def message(self, words: str, user: str) -> str:
        """A message for the next page of this user, as text for its address."""
        return str(self._messages.dumps([user, words]))

    def words(self, message: str, user: str) -> str | None:
        """The words of such a message; None if it is another text, older than a minute, or for
        another user."""
        try:
            of, words = self._messages.loads(message, max_age=MESSAGE_AGE)
        except (BadSignature, TypeError, ValueError):
            return None
        return str(words) if of == user else None


def is_foreign(request: Request) -> bool:
    """Whether another site has sent this form, as far as the browser says."""
    if site := request.headers.get("Sec-Fetch-Site"):
        return site != "same-origin"
    origin = request.headers.get("Origin")
    return origin is not None and origin.partition("://")[2] != request.host
