// Enqueues a job of a task in Python, in a transaction of this program.  Needs the package pg.

import pg from "pg";

const client = new pg.Client({ connectionString: process.env.DATABASE_URL });
await client.connect();
await client.query("BEGIN");
const { rows } = await client.query(
  "SELECT pgqueue.enqueue($1, $2, delay => $3) AS id",
  ["mail.welcome", JSON.stringify({ user_id: 10 }), "0 seconds"],
);
await client.query("COMMIT");
console.log(rows[0].id);
await client.end();
