// graphile-worker with its local queue and batched completion, as its page on performance advises.
// It deletes finished jobs.  The commands and roles are those of protocol.py.
import fs from 'node:fs';
import path from 'node:path';
import readline from 'node:readline';
import { createRequire } from 'node:module';

const require = createRequire(path.join(process.env.BENCHMARK_ENVIRONMENT, 'x.js'));
const { run, makeWorkerUtils, runMigrations, Logger } = require('graphile-worker');
const pg = require('pg');

const connectionString = process.env.BENCHMARK_URL;
const logger = new Logger(() => () => {});
const now = () => Number(process.hrtime.bigint()) / 1e9; // CLOCK_MONOTONIC, as Python's
const sleep = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));
const CHUNK = 1000;

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

let pool, utils;
const commands = {
  async setup() {
    await runMigrations({ connectionString, logger });
    pool = new pg.Pool({ connectionString, max: 2 });
    utils = await makeWorkerUtils({ pgPool: pool, logger });
  },
  async empty() {
    await pool.query('TRUNCATE graphile_worker._private_jobs RESTART IDENTITY CASCADE');
  },
  async each({ first, jobs, gap }) {
    const returned = [];
    const began = now();
    for (let number = first; number < first + jobs; number++) {
      await utils.addJob('nothing', { number });
      returned.push(now());
      if (gap) await sleep(gap);
    }
    return { began, returned };
  },
  async bulk({ first, jobs }) {
    const began = now();
    for (let start = first; start < first + jobs; start += CHUNK) {
      const specs = [];
      for (let number = start; number < Math.min(start + CHUNK, first + jobs); number++)
        specs.push({ identifier: 'nothing', payload: { number } });
      await utils.addJobs(specs);
    }
    return now() - began;
  },
  async left() {
    const found = await pool.query('SELECT count(*)::int AS left FROM graphile_worker._private_jobs');
    return found.rows[0].left;
  },
};

async function work() {
  const directory = process.env.BENCHMARK_BARRIER;
  fs.writeFileSync(path.join(directory, `ready-${process.pid}`), '');
  while (!fs.existsSync(path.join(directory, 'go'))) await sleep(0.002);
  const runner = await run({
    preset: {
      worker: {
        connectionString, logger, concurrentJobs: 24, maxPoolSize: 10,
        localQueue: { size: 500 }, completeJobBatchDelay: 0, failJobBatchDelay: 0,
      },
    },
    taskList: { nothing: async (payload) => noteStart(payload.number) },
  });
  await runner.promise;
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
