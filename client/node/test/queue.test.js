import assert from 'node:assert/strict'
import test from 'node:test'
import { HOLD, NOTHING, Queue, SERVE } from '../lib/queue.js'

const request = (bucket, more) => ({ bucket, elements: 1, keyed: false, joint: false, ...more })
const names = (batch) => batch.map((r) => r.bucket)

/** A queue with requests for buckets 0 to n - 1, and the step of the last. */
function filled(n, { limit = 2, maxWaiting = 10_000, more } = {}) {
  const queue = new Queue(limit, maxWaiting)
  for (let i = 0; i < n; i++) queue.add(request(i, more))
  return queue
}

test('the first request is sent at once, and those that arrive until then join it', () => {
  const queue = new Queue(2, 100)
  assert.equal(queue.add(request('a')), SERVE)
  assert.equal(queue.add(request('b')), NOTHING)
  assert.deepEqual(names(queue.take()), ['a', 'b'])
  assert.equal(queue.next(), NOTHING)
})

test('a bucket is in one open call at most, and in order of arrival', () => {
  const queue = new Queue(3, 100), [a1, a2, a3, b] = [request('a'), request('a'), request('a'), request('b')]
  queue.add(a1)
  const first = queue.take()
  assert.equal(queue.add(a2), NOTHING)
  assert.equal(queue.add(a3), NOTHING)
  assert.equal(queue.add(b), SERVE)
  assert.deepEqual(queue.take(), [b])
  assert.equal(queue.finish(first), SERVE)
  assert.deepEqual(queue.take(), [a2, a3])
})

test('requests with and without an idempotency key never share a call, nor plain and joint ones', () => {
  const queue = new Queue(9, 100)
  for (const [i, [keyed, joint]] of [[true, true], [false, true], [true, false], [false, false], [true, true]].entries()) queue.add(request(i, { keyed, joint }))
  const batches = []
  for (let step = SERVE; step !== NOTHING; step = queue.hurry()) batches.push(names(queue.take()))
  assert.deepEqual(batches, [[0, 4], [1], [2], [3]])
})

test('a call has at most 256 elements, but a joint request is never split', () => {
  assert.equal(filled(300, { limit: 1 }).take().length, 256)
  assert.equal(filled(300, { limit: 1, more: { elements: 100, joint: true } }).take().length, 3)
})

test('what waits is split over the slots, but into calls of 32 at least', () => {
  for (const [waiting, calls] of [[200, [100, 100]], [64, [32, 32]], [40, [32, 8]], [5, [5]]]) {
    const queue = filled(waiting), got = []
    for (let step = SERVE; step === SERVE; step = queue.hurry()) got.push(queue.take().length)
    assert.deepEqual(got, calls)
  }
})

test('requests that are not worth a call beside open calls are held, until a call ends or the owner hurries', () => {
  const queue = filled(32), first = queue.take()
  assert.equal(queue.add(request('x')), HOLD)
  assert.equal(queue.hurry(), SERVE)
  const second = queue.take()
  assert.equal(queue.finish(second), NOTHING)
  assert.equal(queue.add(request('y')), HOLD)
  assert.equal(queue.finish(first), SERVE)
  assert.deepEqual(names(queue.take()), ['y'])
})

test('half a share is worth a call beside an open one', () => {
  const queue = filled(32)
  queue.take()
  const steps = Array.from({ length: 20 }, (_, i) => queue.add(request(`x${i}`)))
  assert.equal(steps.indexOf(SERVE), 15)
})

test('no more than maxWaiting requests wait, but one that can be sent at once is not refused', () => {
  const queue = new Queue(2, 1)
  assert.equal(queue.refuses(request('a')), false)
  queue.add(request('a'))
  queue.take()
  queue.add(request('a')) // waits for the open call
  assert.equal(queue.refuses(request('a')), true)
  assert.equal(queue.refuses(request('b')), false)
  queue.add(request('b'))
  assert.equal(queue.refuses(request('c')), true, 'its slot is reserved')
})

test('whoever leaves before take is not sent, and its place is free', () => {
  const queue = new Queue(1, 1), gone = request('a')
  queue.add(gone)
  assert.equal(queue.leave(gone), true)
  assert.equal(queue.take(), null)
  assert.equal(queue.add(request('b')), SERVE, 'the slot is not reserved for ever')
  const [sent] = queue.take()
  assert.equal(queue.leave(sent), false)
})

test('a call that was given up has no slot, and keeps its buckets until it has ended', () => {
  const queue = new Queue(1, 100)
  queue.add(request('a'))
  const first = queue.take()
  queue.add(request('a'))
  queue.add(request('b'))
  assert.equal(queue.release(first), SERVE)
  const second = queue.take()
  assert.deepEqual(names(second), ['b'])
  assert.equal(queue.finish(second), NOTHING)
  assert.equal(queue.finish(first), SERVE)
  assert.deepEqual(names(queue.take()), ['a'])
})

test('the rules hold in any order of events', () => {
  for (let seed = 1; seed <= 200; seed++) {
    let state = seed
    const random = (n) => (state = (state * 48271) % 2147483647) % n
    const limit = 1 + random(3), maxWaiting = 1 + random(60), queue = new Queue(limit, maxWaiting)
    const waiting = [], open = [], givenUp = [], order = new Map()
    let step = NOTHING, arrivals = 0
    const owned = () => new Set([...open, ...givenUp].flat().map((r) => r.bucket))
    const takeable = () => waiting.some((r) => !owned().has(r.bucket))
    for (let event = 0; event < 300; event++) {
      const wasReserved = step === SERVE
      let next = NOTHING
      switch (random(6)) {
        case 0: case 1: {
          const r = request(`b${random(25)}`, { keyed: random(4) === 0, joint: random(4) === 0, elements: 1, arrival: arrivals++ })
          const atOnce = !wasReserved && open.length < limit && !owned().has(r.bucket)
          assert.equal(queue.refuses(r), waiting.length >= maxWaiting && !atOnce)
          if (queue.refuses(r)) continue
          waiting.push(r)
          next = queue.add(r)
          break
        }
        case 2: {
          if (!wasReserved) continue
          step = NOTHING
          const before = owned(), batch = queue.take()
          if (batch === null) { assert.ok(!takeable()); continue }
          for (const r of batch) {
            assert.ok(!before.has(r.bucket), 'a bucket in two calls')
            assert.equal(`${r.keyed} ${r.joint}`, `${batch[0].keyed} ${batch[0].joint}`)
            const kind = `${r.bucket} ${r.keyed} ${r.joint}`
            assert.ok(r.arrival > (order.get(kind) ?? -1), 'out of order')
            order.set(kind, r.arrival)
            waiting.splice(waiting.indexOf(r), 1)
          }
          open.push(batch)
          assert.ok(open.length <= limit, 'too many calls')
          next = queue.next()
          break
        }
        case 3:
          if (open.length === 0) continue
          next = queue.finish(open.splice(random(open.length), 1)[0])
          break
        case 4: {
          if (open.length === 0) continue
          const [batch] = open.splice(random(open.length), 1)
          givenUp.push(batch)
          next = queue.release(batch)
          if (random(2) === 0) { // and it ends at once
            givenUp.pop()
            const then = queue.finish(batch)
            if (next !== SERVE) next = then
          }
          break
        }
        case 5: {
          if (waiting.length === 0) continue
          const [r] = waiting.splice(random(waiting.length), 1)
          assert.ok(queue.leave(r))
        }
      }
      assert.ok(!(wasReserved && next === SERVE) || step === NOTHING, 'two slots are reserved')
      if (next === HOLD) {
        assert.ok(open.length > 0, 'held beside no call')
        next = queue.hurry()
        assert.equal(next, SERVE, 'requests that were held cannot be sent')
      }
      if (next === SERVE) step = SERVE
      assert.equal(queue.waiting.size, waiting.length)
      if (step !== SERVE && open.length < limit) assert.ok(!takeable(), 'a request waits for nothing')
    }
  }
})
