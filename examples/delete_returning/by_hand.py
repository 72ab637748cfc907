"""By hand: the claim is a deleted row, as long as its transaction is open.

DATABASE_URL=postgresql://... python -m examples.delete_returning.by_hand
"""

from sqlalchemy import Engine, text

from examples.payments import open_shop, pay

ITEMS = text("CREATE TABLE IF NOT EXISTS items (id bigint PRIMARY KEY)")

ENQUEUE = text("INSERT INTO items SELECT generate_series(1, :how_many)")

TAKE = text("""
DELETE FROM items
WHERE id = (
    SELECT id
    FROM items
    ORDER BY id
    LIMIT 1
    FOR UPDATE SKIP LOCKED
)
RETURNING id
""")


def create_tables(engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(ITEMS)


def enqueue(engine: Engine, how_many: int) -> None:
    """Insert the items 1, 2, 3 and so on."""
    with engine.begin() as connection:
        connection.execute(ENQUEUE, {"how_many": how_many})


def work_one(engine: Engine) -> bool:
    """Delete an item and do its work in one transaction.  Return False if there is none."""
    with engine.begin() as connection:
        item = connection.scalar(TAKE)
        if item is None:
            return False
        pay(connection, item)
        return True


def work_until_empty(engine: Engine) -> None:
    while work_one(engine):
        pass


if __name__ == "__main__":
    engine = open_shop()
    create_tables(engine)
    enqueue(engine, 3)
    work_until_empty(engine)
    with engine.connect() as connection:
        print("left:", connection.scalar(text("SELECT count(*) FROM items")))
        print("paid:", connection.scalars(text("SELECT order_id FROM payments")).all())
