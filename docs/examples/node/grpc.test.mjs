// Every call of the service, and its errors as a client in Node sees them:
//
//   RATELIMIT_TOKEN=… node --test grpc.test.mjs    # with the policies below, and PG… of the same database
//
//   select ratelimit_define_policy('api', 10, 1, '1 day'), ratelimit_define_policy('budget', 1000, 0, '1 day');
import assert from 'node:assert/strict'
import { after, test } from 'node:test'
import { fileURLToPath } from 'node:url'
import grpc from '@grpc/grpc-js'
import protoLoader from '@grpc/proto-loader'
import pg from 'pg'
import protobuf from 'protobufjs'

const { RATELIMIT_GRPC: SERVER = 'localhost:8081', RATELIMIT_TOKEN: TOKEN = 'secret' } = process.env
const PROTO = fileURLToPath(new URL('../../../server/proto/pgratelimit/v1/ratelimiter.proto', import.meta.url))

const { pgratelimit } = grpc.loadPackageDefinition(protoLoader.loadSync(PROTO, { keepCase: true, longs: Number, enums: String, defaults: true }))
const client = new pgratelimit.v1.RateLimiter(SERVER, grpc.credentials.createInsecure())
after(() => client.close())

function call(method, request, { token = TOKEN, deadline = 60_000 } = {}) {
  const metadata = new grpc.Metadata()
  if (token) metadata.set('authorization', `Bearer ${token}`)
  return new Promise((resolve, reject) => {
    client[method](request, metadata, { deadline: Date.now() + deadline }, (error, answer) => (error ? reject(error) : resolve(answer)))
  })
}

// An error's details are a google.rpc.Status in its metadata.
const { root } = protobuf.parse(`syntax = "proto3"; package google.rpc;
  message Any { string type_url = 1; bytes value = 2; }
  message Status { int32 code = 1; string message = 2; repeated Any details = 3; }
  message ErrorInfo { string reason = 1; string domain = 2; map<string, string> metadata = 3; }`)

function errorInfo(error) {
  const [packed] = error.metadata.get('grpc-status-details-bin')
  assert(packed, `an error without details: ${error}`)
  const { details } = root.lookupType('google.rpc.Status').decode(packed)
  const info = details.find(({ type_url: url, typeUrl = url }) => typeUrl === 'type.googleapis.com/google.rpc.ErrorInfo')
  return root.lookupType('google.rpc.ErrorInfo').decode(info.value)
}

async function refused(promise, code, sqlState) {
  const error = await promise.then(
    (answer) => assert.fail(`no error: ${JSON.stringify(answer)}`),
    (error) => error,
  )
  assert.equal(grpc.status[error.code], code, error)
  const info = errorInfo(error)
  assert.equal(info.domain, 'pgratelimit')
  assert.notEqual(info.reason, '')
  assert.equal(info.metadata.sqlstate, sqlState)
}

const DAY = 86_400 // s

const within = (low, high) => (seconds) => low < seconds && seconds <= high

/** The fields of an answer and of the decision in it, with durations as seconds. */
function fields({ whole, decision, ...answer }) {
  const all = Object.entries({ ...whole, ...decision, ...answer })
  return Object.fromEntries(all.map(([name, value]) => [name, value?.nanos === undefined ? value : value.seconds + value.nanos / 1e9]))
}

const api = (logical_key, more) => ({ policy: 'api', logical_key, ...more })
const budget = (logical_key, more) => ({ policy: 'budget', logical_key, ...more })
const job = { policy: 'jobs', logical_key: 'node', holder: 'attempt 1' }
const max_wait = { seconds: 20 * DAY }
const both = { charges: [api('all', { cost: 1 }), budget('all', { cost: 900 })] }

// Calls in their order, each with fields of its answer, or with the code and the SQLSTATE of its error.
const stories = {
  'Acquire grants and denies, an absent cost is 1, and 0 is 0': [
    ['Acquire', api('acquire', { cost: 8 }), { verdict: 'ALLOWED', remaining: 2, capacity: 10, retry_after: 0, reset_after: 8 * DAY }],
    ['Acquire', api('acquire'), { remaining: 1 }],
    ['Acquire', api('acquire', { cost: 0 }), { remaining: 1 }],
    ['Acquire', api('acquire', { cost: 2 }), { verdict: 'DENIED', remaining: 1, retry_after: within(0.99 * DAY, DAY) }],
    ['Acquire', api('acquire', { cost: 11 }), { verdict: 'DENIED', retry_after: null }],
  ],
  'Acquire under a request_id is charged once': [
    ['Acquire', budget('again', { cost: 300, request_id: 'job-7' }), { replayed: false }],
    ['Acquire', budget('again', { cost: 300, request_id: 'job-7' }), { replayed: true, remaining: 700 }],
    ['Peek', budget('again'), { remaining: 700 }],
    ['Acquire', budget('again', { cost: 301, request_id: 'job-7' }), 'ALREADY_EXISTS', 'RL002'],
  ],
  'AcquireAll takes from all or from none': [
    ['AcquireAll', both, { verdict: 'ALLOWED', binding: 1, decisions: (decisions) => decisions.map((d) => d.remaining).join() === '9,100' }],
    ['AcquireAll', both, { verdict: 'DENIED', binding: 1, retry_after: null }],
    ['Peek', api('all'), { remaining: 9 }],
    ['Peek', budget('all'), { remaining: 100 }],
  ],
  'Charge takes what is not there, and Refund gives back, never above the capacity': [
    ['Charge', budget('charge', { cost: 1200 }), { remaining: -200 }],
    ['Refund', budget('charge', { amount: 150 }), { remaining: -50 }],
    ['Refund', budget('charge', { amount: 9999 }), { remaining: 950 }],
    ['Refund', budget('charge', { amount: 51 }), { remaining: 1000 }],
  ],
  'Pause stops a bucket': [
    ['Pause', api('pause', { pause_for: { seconds: 3600 } }), { verdict: 'DENIED', remaining: 0 }],
  ],
  'Hold lends slots until Release': [
    ['Hold', job, { held_for: 60 }],
    ['Hold', job, { renewed: true }],
    ['Hold', { ...job, holder: 'attempt 2' }, { verdict: 'DENIED' }],
    ['Renew', job, { held_for: 60 }],
    ['Release', job, { released: true }],
    ['Renew', job, { held_for: null }],
  ],
  'Settle replaces an estimate, once': [
    ['Acquire', budget('settle', { request_id: 'job-8', cost: 300 }), { remaining: 700 }],
    ['Settle', budget('settle', { request_id: 'job-8', cost: 120 }), { remaining: 880 }],
    ['Settle', budget('settle', { request_id: 'job-8', cost: 120 }), { remaining: 880, replayed: true }],
    ['Settle', budget('settle', { request_id: 'job-9', cost: 1 }), 'FAILED_PRECONDITION', 'RL003'],
  ],
  'Peek takes nothing': [
    ['Peek', api('peek', { cost: 10 }), { verdict: 'ALLOWED', remaining: 10 }],
    ['Peek', api('peek', { cost: 10 }), { verdict: 'ALLOWED', remaining: 10 }],
  ],
  'AcquireUpTo takes what there is': [
    ['AcquireUpTo', budget('up to', { at_most: 1200 }), { verdict: 'ALLOWED', taken: 1000 }],
    ['AcquireUpTo', budget('up to', { at_most: 5 }), { verdict: 'DENIED', taken: 0 }],
  ],
  'Reserve waits in line': [
    ['Reserve', api('reserve', { cost: 10, max_wait }), { wait: 0 }],
    ['Reserve', api('reserve', { cost: 5, max_wait }), { verdict: 'ALLOWED', remaining: -5, wait: within(4.9 * DAY, 5 * DAY) }],
    ['Reserve', api('reserve', { cost: 10, max_wait: { seconds: 60 } }), { verdict: 'DENIED' }],
  ],
  'mistakes have a code and a reason': [
    ['Acquire', { policy: 'nobody', logical_key: 'k' }, 'NOT_FOUND', 'RL001'],
    ['Acquire', api(''), 'INVALID_ARGUMENT', '22023'],
    ['Acquire', api('k', { cost: -1 }), 'INVALID_ARGUMENT', '22023'],
    ['Acquire', api('k'.repeat(513)), 'INVALID_ARGUMENT', '22023'],
    ['Charge', api('k'), 'INVALID_ARGUMENT', '22023'],
    ['Settle', api('k', { cost: 1 }), 'INVALID_ARGUMENT', '22023'],
    ['Refund', api('k', { amount: -1 }), 'INVALID_ARGUMENT', '22023'],
    ['AcquireAll', { charges: [] }, 'INVALID_ARGUMENT', '22023'],
    ['AcquireMany', { requests: [] }, 'INVALID_ARGUMENT', '22023'],
    ['AcquireUpTo', api('k'), 'INVALID_ARGUMENT', '22023'],
    ['Reserve', api('k'), 'INVALID_ARGUMENT', '22023'],
  ],
}

for (const [story, calls] of Object.entries(stories)) {
  test(story, async () => {
    for (const [method, request, wanted, sqlState] of calls) {
      if (sqlState) {
        await refused(call(method, request), wanted, sqlState)
        continue
      }
      const got = fields(await call(method, request))
      for (const [name, want] of Object.entries(wanted)) {
        if (typeof want === 'function') assert.ok(want(got[name]), JSON.stringify([method, got]))
        else assert.equal(got[name], want, JSON.stringify([method, got]))
      }
    }
  })
}

test('AcquireMany answers each request by itself', async () => {
  const requests = [api('many', { cost: 8 }), { policy: 'nobody', logical_key: 'many' }, api('many', { cost: 8 })]
  const { answers } = await call('AcquireMany', { requests })
  assert.deepEqual(answers.map((a) => a.decision?.verdict), ['ALLOWED', undefined, 'DENIED'])
  assert.equal(answers[0].error, null)
  assert.deepEqual([answers[1].error.code, answers[1].error.reason, answers[1].error.sqlstate], [grpc.status.NOT_FOUND, 'UNKNOWN_POLICY', 'RL001'])
})

test('AcquireStream answers under the ids of the messages', async () => {
  const metadata = new grpc.Metadata()
  metadata.set('authorization', `Bearer ${TOKEN}`)
  const stream = client.AcquireStream(metadata, { deadline: Date.now() + 60_000 })
  for (let id = 1; id <= 300; id++) {
    stream.write({ id, requests: [{ policy: 'budget', logical_key: 'stream' }, { policy: 'budget', logical_key: `stream ${id}`, cost: 1001 }] })
  }
  stream.end()
  const ids = new Set()
  for await (const { id, answers } of stream) {
    assert.deepEqual(answers.map((a) => a.decision.verdict), ['ALLOWED', 'DENIED'])
    ids.add(id)
  }
  assert.equal(ids.size, 300)
  assert.equal((await call('Peek', { policy: 'budget', logical_key: 'stream' })).remaining, 700)
})

test('a token is needed', async () => {
  for (const token of ['', 'wrong']) {
    await refused(call('Peek', { policy: 'api', logical_key: 'k' }, { token }), 'UNAUTHENTICATED')
  }
})

test('a deadline ends a call, which has taken nothing', async () => {
  const other = new pg.Client()
  await other.connect()
  try {
    const request = { policy: 'budget', logical_key: 'locked', cost: 10 }
    await call('Acquire', request)
    await other.query("begin; select ratelimit_acquire('budget', 'locked', 1)")
    const error = await call('Acquire', request, { deadline: 100 }).catch((error) => error)
    // The server knows the deadline, too. If it is the first to end the call, grpc-js says that it was cancelled.
    assert.ok([grpc.status.DEADLINE_EXCEEDED, grpc.status.CANCELLED].includes(error.code), error)
    await refused(call('Acquire', request), 'ABORTED', '55P03') // after LOCK_TIMEOUT
    await other.query('rollback')
    assert.equal((await call('Peek', request)).remaining, 990)
  } finally {
    await other.end()
  }
})
