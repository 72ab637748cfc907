"""Newsletters: a batch of mails each, with a page for its progress."""

from flask import Blueprint, redirect, render_template, request, url_for
from flask_login import login_required
from orders import send_mail
from shop import db, queue
from sqlalchemy import BigInteger
from sqlalchemy.orm import Mapped, mapped_column

READERS = 300

newsletters = Blueprint("newsletters", __name__)


class Newsletter(db.Model):
    __tablename__ = "newsletters"
    id: Mapped[int] = mapped_column(primary_key=True)
    subject: Mapped[str]
    batch_id: Mapped[int] = mapped_column(BigInteger)
    is_sent: Mapped[bool] = mapped_column(default=False)


def send_newsletter(subject):
    """Add a newsletter and its mails to the transaction of ``db.session``."""
    with queue.batch(db.session, subject, on_success=note_sent) as batch:
        mails = [(f"reader-{number}@example.org", subject) for number in range(READERS)]
        send_mail.enqueue_many(db.session, mails)
    newsletter = Newsletter(subject=subject, batch_id=batch.id)
    db.session.add(newsletter)
    db.session.flush()
    return newsletter


@queue.task(name="newsletters.note_sent", transactional=True)
def note_sent(batch_id: int) -> None:
    db.session.query(Newsletter).filter_by(batch_id=batch_id).update({"is_sent": True})


@newsletters.post("/newsletters")
@login_required
def send():
    newsletter = send_newsletter(request.form["subject"])
    db.session.commit()
    return redirect(url_for("newsletters.show", newsletter_id=newsletter.id))


@newsletters.get("/newsletters/<int:newsletter_id>")
def show(newsletter_id):
    newsletter = db.get_or_404(Newsletter, newsletter_id)
    progress = queue.progress_of(db.session, newsletter.batch_id)
    return render_template("newsletter.html", newsletter=newsletter, progress=progress)
