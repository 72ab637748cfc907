"""Pictures and their thumbnails, which are made in child processes."""

import io
from datetime import timedelta

from flask import Blueprint, Response, abort, redirect, request, url_for
from PIL import Image
from shop import db, queue
from sqlalchemy.orm import Mapped, mapped_column

pictures = Blueprint("pictures", __name__)


class Picture(db.Model):
    __tablename__ = "pictures"
    id: Mapped[int] = mapped_column(primary_key=True)
    original: Mapped[bytes] = mapped_column(deferred=True)
    thumbnail: Mapped[bytes | None] = mapped_column(deferred=True)


def add_picture(original):
    """Add a picture, and the job of its thumbnail, to the transaction of ``db.session``."""
    picture = Picture(original=original)
    db.session.add(picture)
    db.session.flush()
    make_thumbnail.enqueue(db.session, picture.id)
    return picture


@queue.task(
    name="pictures.thumbnail",
    queue="pictures",
    max_attempts=1,  # a file that is no picture stays one
    executor="process",  # a file of a customer may crash the library, or fill the memory
    timeout=timedelta(seconds=20),
    memory_limit=2 * 2**30,
)
def make_thumbnail(picture_id: int) -> None:
    picture = db.session.get_one(Picture, picture_id)
    with Image.open(io.BytesIO(picture.original)) as image:
        small = image.convert("RGB")
    small.thumbnail((64, 64))
    written = io.BytesIO()
    small.save(written, "PNG")
    picture.thumbnail = written.getvalue()
    db.session.commit()


@pictures.post("/pictures")
def upload():
    add_picture(request.files["picture"].read())
    db.session.commit()
    return redirect(url_for("site.index"))


@pictures.get("/pictures/<int:picture_id>.png")
def show(picture_id):
    picture = db.get_or_404(Picture, picture_id)
    if not picture.thumbnail:
        abort(404)
    return Response(picture.thumbnail, mimetype="image/png")
