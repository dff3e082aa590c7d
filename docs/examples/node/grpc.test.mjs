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
  return error
}

const seconds = ({ seconds, nanos }) => seconds + nanos / 1e9

test('Acquire grants and denies', async () => {
  const granted = await call('Acquire', { policy: 'api', logical_key: 'acquire', cost: 8 })
  assert.equal(granted.verdict, 'ALLOWED')
  assert.equal(granted.remaining, 2)
  assert.equal(granted.capacity, 10)
  assert.equal(seconds(granted.retry_after), 0)
  assert.equal(seconds(granted.reset_after), 8 * 86400)

  assert.equal((await call('Acquire', { policy: 'api', logical_key: 'acquire' })).remaining, 1, 'an absent cost is 1')
  assert.equal((await call('Acquire', { policy: 'api', logical_key: 'acquire', cost: 0 })).remaining, 1, 'and 0 is 0')

  const denied = await call('Acquire', { policy: 'api', logical_key: 'acquire', cost: 2 })
  assert.equal(denied.verdict, 'DENIED')
  assert.equal(denied.remaining, 1)
  assert(seconds(denied.retry_after) > 86000 && seconds(denied.retry_after) <= 86400, denied)

  const never = await call('Acquire', { policy: 'api', logical_key: 'acquire', cost: 11 })
  assert.equal(never.verdict, 'DENIED')
  assert.equal(never.retry_after, null)
})

test('Acquire under a request_id is charged once', async () => {
  const request = { policy: 'budget', logical_key: 'again', cost: 300, request_id: 'job-7' }
  assert.equal((await call('Acquire', request)).replayed, false)
  const again = await call('Acquire', request)
  assert.equal(again.replayed, true)
  assert.equal(again.remaining, 700)
  assert.equal((await call('Peek', { policy: 'budget', logical_key: 'again' })).remaining, 700)
  await refused(call('Acquire', { ...request, cost: 301 }), 'ALREADY_EXISTS', 'RL002')
})

test('AcquireAll takes from all or from none', async () => {
  const charges = [
    { policy: 'api', logical_key: 'all', cost: 1 },
    { policy: 'budget', logical_key: 'all', cost: 900 },
  ]
  const granted = await call('AcquireAll', { charges })
  assert.equal(granted.whole.verdict, 'ALLOWED')
  assert.deepEqual(granted.decisions.map((d) => d.remaining), [9, 100])
  assert.equal(granted.binding, 1)

  const denied = await call('AcquireAll', { charges })
  assert.equal(denied.whole.verdict, 'DENIED')
  assert.equal(denied.whole.retry_after, null, 'budget does not refill')
  assert.equal(denied.binding, 1)
  assert.deepEqual(denied.decisions.map((d) => d.remaining), [9, 100])
})

test('Charge takes what is not there, and Refund gives back', async () => {
  const bucket = { policy: 'budget', logical_key: 'charge' }
  assert.equal((await call('Charge', { ...bucket, cost: 1200 })).remaining, -200)
  assert.equal((await call('Refund', { ...bucket, amount: 150 })).remaining, -50)
  assert.equal((await call('Refund', { ...bucket, amount: 9999 })).remaining, 950, 'more than the capacity counts as the capacity')
  assert.equal((await call('Refund', { ...bucket, amount: 51 })).remaining, 1000, 'and no bucket holds more')
})

test('Hold lends slots until Release', async () => {
  const job = { policy: 'jobs', logical_key: 'node', holder: 'attempt 1' }
  assert.equal(seconds((await call('Hold', job)).held_for), 60)
  assert.equal((await call('Hold', job)).renewed, true)
  assert.equal((await call('Hold', { ...job, holder: 'attempt 2' })).verdict, 'DENIED')
  assert.equal(seconds((await call('Renew', job)).held_for), 60)
  assert.equal((await call('Release', job)).released, true)
  assert.equal((await call('Renew', job)).held_for, null)
})

test('Settle replaces an estimate, once', async () => {
  const grant = { policy: 'budget', logical_key: 'settle', request_id: 'job-8' }
  await call('Acquire', { ...grant, cost: 300 })
  assert.equal((await call('Settle', { ...grant, cost: 120 })).remaining, 880)
  const again = await call('Settle', { ...grant, cost: 120 })
  assert.equal(again.remaining, 880)
  assert.equal(again.replayed, true)
  await refused(call('Settle', { ...grant, request_id: 'job-9', cost: 1 }), 'FAILED_PRECONDITION', 'RL003')
})

test('Peek takes nothing', async () => {
  for (let i = 0; i < 2; i++) {
    const d = await call('Peek', { policy: 'api', logical_key: 'peek', cost: 10 })
    assert.equal(d.verdict, 'ALLOWED')
    assert.equal(d.remaining, 10)
  }
})

test('AcquireMany and PeekMany answer each request by itself', async () => {
  const requests = [
    { policy: 'api', logical_key: 'many', cost: 8 },
    { policy: 'nobody', logical_key: 'many' },
    { policy: 'api', logical_key: 'many', cost: 8 },
  ]
  const { answers } = await call('AcquireMany', { requests })
  assert.deepEqual(answers.map((a) => a.decision?.verdict), ['ALLOWED', undefined, 'DENIED'])
  assert.equal(answers[0].error, null)
  assert.deepEqual([answers[1].error.code, answers[1].error.reason, answers[1].error.sqlstate], [grpc.status.NOT_FOUND, 'UNKNOWN_POLICY', 'RL001'])

  const peeked = await call('PeekMany', { requests: requests.map(({ policy, logical_key }) => ({ policy, logical_key, cost: 2 })) })
  assert.deepEqual(peeked.answers.map((a) => a.decision?.remaining), [2, undefined, 2])
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

test('AcquireUpTo takes what there is', async () => {
  const bucket = { policy: 'budget', logical_key: 'up to' }
  const some = await call('AcquireUpTo', { ...bucket, at_most: 1200 })
  assert.deepEqual([some.decision.verdict, some.taken], ['ALLOWED', 1000])
  const none = await call('AcquireUpTo', { ...bucket, at_most: 5 })
  assert.deepEqual([none.decision.verdict, none.taken], ['DENIED', 0])
})

test('Reserve waits in line', async () => {
  const request = { policy: 'api', logical_key: 'reserve', cost: 10, max_wait: { seconds: 20 * 86400 } }
  assert.equal(seconds((await call('Reserve', request)).wait), 0)
  const waits = await call('Reserve', { ...request, cost: 5 })
  assert.equal(waits.verdict, 'ALLOWED')
  assert.equal(waits.remaining, -5)
  assert(seconds(waits.wait) > 4.9 * 86400 && seconds(waits.wait) <= 5 * 86400, waits)
  const refused = await call('Reserve', { ...request, max_wait: { seconds: 60 } })
  assert.equal(refused.verdict, 'DENIED')
})

test('mistakes have a code and a reason', async () => {
  await refused(call('Acquire', { policy: 'nobody', logical_key: 'k' }), 'NOT_FOUND', 'RL001')
  await refused(call('Acquire', { policy: 'api', logical_key: '' }), 'INVALID_ARGUMENT', '22023')
  await refused(call('Acquire', { policy: 'api', logical_key: 'k', cost: -1 }), 'INVALID_ARGUMENT', '22023')
  await refused(call('Acquire', { policy: 'api', logical_key: 'k'.repeat(513) }), 'INVALID_ARGUMENT', '22023')
  await refused(call('Charge', { policy: 'api', logical_key: 'k' }), 'INVALID_ARGUMENT', '22023')
  await refused(call('Settle', { policy: 'api', logical_key: 'k', cost: 1 }), 'INVALID_ARGUMENT', '22023')
  await refused(call('Refund', { policy: 'api', logical_key: 'k', amount: -1 }), 'INVALID_ARGUMENT', '22023')
  await refused(call('AcquireAll', { charges: [] }), 'INVALID_ARGUMENT', '22023')
  await refused(call('AcquireMany', { requests: [] }), 'INVALID_ARGUMENT', '22023')
  await refused(call('PeekMany', { requests: [] }), 'INVALID_ARGUMENT', '22023')
  await refused(call('AcquireUpTo', { policy: 'api', logical_key: 'k' }), 'INVALID_ARGUMENT', '22023')
  await refused(call('Reserve', { policy: 'api', logical_key: 'k' }), 'INVALID_ARGUMENT', '22023')
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
