// pg-boss: a flow, at its fastest setting: it releases what waits for others once a second, its
// workers are woken by notifications and claim 500 jobs at once.
// The commands and roles are those of protocol.py.
import fs from 'node:fs';
import path from 'node:path';
import readline from 'node:readline';
import { createRequire } from 'node:module';

const require = createRequire(path.join(process.env.BENCHMARK_ENVIRONMENT, 'x.js'));
const { PgBoss } = await import(require.resolve('pg-boss'));
const pg = require('pg');

const connectionString = process.env.BENCHMARK_URL;
const QUEUE = 'nothing';
const now = () => Number(process.hrtime.bigint()) / 1e9; // CLOCK_MONOTONIC, as Python's
const sleep = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));

let starts = null;
const seen = new Set();
function noteStart(number) {
  starts ??= fs.openSync(process.env.BENCHMARK_STARTS, 'r+');
  const record = Buffer.alloc(16);
  if (seen.has(number)) fs.readSync(starts, record, 0, 16, number * 16);
  seen.add(number);
  const times = record.readBigUInt64LE(8);
  if (times === 0n) record.writeDoubleLE(now(), 0);
  record.writeBigUInt64LE(times + 1n, 8);
  fs.writeSync(starts, record, 0, 16, number * 16);
}

function fan(first, jobs) {
  const job = (number, dependsOn) => ({
    ref: `${number}`, name: QUEUE, data: { number }, ...(dependsOn.length ? { dependsOn } : {}),
  });
  const last = first + jobs - 1;
  const parts = [];
  for (let number = first + 1; number < last; number++) parts.push(job(number, [`${first}`]));
  return [job(first, []), ...parts, job(last, parts.map((one) => one.ref))];
}

async function begun(options) {
  const boss = new PgBoss({ connectionString, useListenNotify: true, ...options });
  boss.on('error', (error) => console.error(error));
  await boss.start();
  return boss;
}

let pool, boss;
const commands = {
  async setup() {
    boss = await begun({ supervise: false, schedule: false });
    await boss.createQueue(QUEUE, { notify: true });
    pool = new pg.Pool({ connectionString, max: 1 });
  },
  async empty() {
    await pool.query('TRUNCATE pgboss.job, pgboss.job_dependency CASCADE');
  },
  async bulk({ first, jobs }) {
    const began = now();
    await boss.flow(fan(first, jobs));
    return now() - began;
  },
  async left() {
    const found = await pool.query(
      "SELECT count(*)::int AS left FROM pgboss.job WHERE state < 'completed'",
    );
    return found.rows[0].left;
  },
};

async function work() {
  const worker = await begun({ flowIntervalSeconds: 1 });
  const directory = process.env.BENCHMARK_BARRIER;
  fs.writeFileSync(path.join(directory, `ready-${process.pid}`), '');
  while (!fs.existsSync(path.join(directory, 'go'))) await sleep(0.002);
  const often = { pollingIntervalSeconds: 0.5, notifyPollingIntervalSeconds: 0.5 };
  await worker.work(QUEUE, { batchSize: 500, burstWhenBatchFull: true, ...often }, async (jobs) => {
    for (const job of jobs) noteStart(job.data.number);
  });
}

async function serve() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const command = JSON.parse(line);
    let answer;
    try {
      answer = { done: (await commands[command.do](command)) ?? null };
    } catch (error) {
      answer = { failed: String(error.stack || error) };
    }
    process.stdout.write(JSON.stringify(answer) + '\n');
  }
  process.exit(0);
}

await (process.argv[2] === 'work' ? work() : serve());
