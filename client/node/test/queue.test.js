import assert from 'node:assert/strict'
import test from 'node:test'
import { Queue } from '../lib/queue.js'

const request = (bucket, more) => ({ bucket, elements: 1, keyed: false, joint: false, ...more })

/** A queue with requests for buckets 0 to n - 1. */
function filled(n, { limit = 2, more } = {}) {
  const queue = new Queue(limit, 10_000)
  for (let i = 0; i < n; i++) queue.add(request(i, more))
  return queue
}

/** The batches that can be opened at once. */
function opened(queue, hurry) {
  const batches = []
  for (let batch; (batch = queue.take(hurry));) batches.push(batch)
  return batches
}

test('a call has at most 256 elements, but a joint request is never split', () => {
  assert.equal(filled(300, { limit: 1 }).take().length, 256)
  assert.equal(filled(300, { limit: 1, more: { elements: 100, joint: true } }).take().length, 3)
})

test('what waits is split over the places, but into calls of 32 at least', () => {
  for (const [waiting, calls] of [[200, [100, 100]], [64, [32, 32]], [40, [32, 8]], [5, [5]]]) {
    assert.deepEqual(opened(filled(waiting), true).map((batch) => batch.length), calls)
  }
})

test('the rest of the requests for a bucket are in its call, whatever its share', () => {
  const queue = filled(64)
  for (let i = 0; i < 3; i++) queue.add(request(0))
  assert.deepEqual(opened(queue).map((batch) => batch.length), [37, 30])
})

test('half a share is worth a call beside an open one', () => {
  const queue = filled(32)
  queue.take()
  const calls = Array.from({ length: 20 }, (_, i) => {
    queue.add(request(`x${i}`))
    return queue.take()
  })
  assert.equal(calls.findIndex((batch) => batch !== null), 15)
})

test('the rules hold in any order of events', () => {
  for (let seed = 1; seed <= 200; seed++) {
    let state = seed
    const random = (n) => (state = (state * 48271) % 2147483647) % n
    const limit = 1 + random(3), maxWaiting = 1 + random(60), queue = new Queue(limit, maxWaiting)
    const waiting = [], open = [], givenUp = [], order = new Map()
    const owned = () => new Set([...open, ...givenUp].flat().map((r) => r.bucket))
    const takeable = () => waiting.some((r) => !owned().has(r.bucket))
    const some = (array) => array.splice(random(array.length), 1)[0]
    for (let event = 0; event < 300; event++) {
      const kind = random(6)
      if (kind <= 1) {
        const r = request(`b${random(25)}`, { keyed: random(4) === 0, joint: random(4) === 0, arrival: event })
        const atOnce = open.length < limit && !owned().has(r.bucket) && !takeable()
        assert.equal(queue.refuses(r), waiting.length >= maxWaiting && !atOnce)
        if (queue.refuses(r)) continue
        waiting.push(r)
        queue.add(r)
      } else if (kind === 2) {
        const before = owned(), hurry = random(2) === 0, batch = queue.take(hurry)
        if (batch === null) {
          const isLingering = open.length < limit && takeable()
          assert.equal(queue.isLingering, isLingering, 'a request waits for nothing')
          assert.ok(!isLingering || (open.length > 0 && !hurry), 'lingers beside no call, or in a hurry')
          continue
        }
        for (const r of batch) {
          assert.ok(!before.has(r.bucket), 'a bucket in two calls')
          assert.equal(`${r.keyed} ${r.joint}`, `${batch[0].keyed} ${batch[0].joint}`)
          const line = `${r.bucket} ${r.keyed} ${r.joint}`
          assert.ok(r.arrival > (order.get(line) ?? -1), 'out of order')
          order.set(line, r.arrival)
          waiting.splice(waiting.indexOf(r), 1)
        }
        open.push(batch)
        assert.ok(open.length <= limit, 'too many calls')
      } else if (kind === 3 && open.length > 0) {
        queue.finish(some(open))
      } else if (kind === 4 && open.length > 0) {
        const batch = some(open)
        queue.giveUp(batch)
        givenUp.push(batch)
      } else if (kind === 5 && givenUp.length > 0 && random(2) === 0) {
        queue.finish(some(givenUp))
      } else if (kind === 5 && waiting.length > 0) {
        assert.ok(queue.leave(some(waiting)))
      }
      assert.equal(queue.waiting.size, waiting.length)
    }
  }
})
