/** The most elements of one call. It bounds its locks and the wait of its callers; a batch below it still takes a whole joint request. */
const MAX_BATCH = 256

/** So many requests make a call worth its fixed cost, which is then about a quarter of their cost. */
const MIN_SHARE = 32

/** The next duty of a queue's owner: nothing, to call take(), or to wait for more requests and then call hurry(). */
export const NOTHING = 0, SERVE = 1, HOLD = 2

/**
 * Decides which requests share a call, and when a call is made. It is a state machine without timers or I/O: its owner makes the calls.
 *
 * A request has a bucket (its name; all buckets of a joint request are one, named after them all), elements (its size in a call), keyed
 * and joint. It waits until take() puts it into a batch, whose buckets belong to it until finish(), and whose slot until then or release().
 * add(), release(), finish() and hurry() may reserve a slot. Requests that arrive between that and take() can join the batch.
 *
 * Invariants, between any two methods:
 *
 * 1. At most `limit` slots are in use: one for each open batch, and at most one that is reserved.
 * 2. A bucket belongs to at most one unfinished batch.
 * 3. While a slot is free and none is reserved, each waiting request is for a bucket of an unfinished batch, or is held. Requests are
 *    held only while a batch is open, from HOLD until hurry(). So a stalled call holds up its own buckets only.
 * 4. Requests for one bucket are taken in order of arrival. Requests with and without an idempotency key are two orders.
 * 5. A batch that has MAX_BATCH elements takes no more. Its requests are all keyed or none is, and all joint or none.
 * 6. At most `maxWaiting` requests wait, besides one that can be sent at once.
 */
export class Queue {
  waiting = new Set() // in order of arrival
  #open = new Set()
  #owned = new Set() // buckets of unfinished batches
  #reserved = false

  constructor(limit, maxWaiting) {
    this.limit = limit
    this.maxWaiting = maxWaiting
  }

  /** Whether another request must not wait. One that can be sent at once is never refused. */
  refuses(request) {
    return this.waiting.size >= this.maxWaiting && !(this.#isFree() && this.#isTakeable(request))
  }

  add(request) {
    this.waiting.add(request)
    return this.#isFree() && this.#isTakeable(request) ? this.#reserve() : NOTHING
  }

  /** Takes back a request that was not sent yet, and returns whether it was so. */
  leave(request) { return this.waiting.delete(request) }

  /** Opens a batch in the reserved slot: requests from the head of the line. If there is none, the slot is free again. */
  take() {
    this.#reserved = false
    const batch = [], mine = new Set(), share = this.#share()
    let elements = 0
    for (const request of this.waiting) {
      if (elements >= MAX_BATCH) break
      if (batch.length > 0 && (request.keyed !== batch[0].keyed || request.joint !== batch[0].joint)) continue
      // No other batch could take a request for a bucket of this one, so the share does not count for it.
      if (!mine.has(request.bucket) && (this.#owned.has(request.bucket) || batch.length >= share)) continue
      mine.add(request.bucket)
      this.#owned.add(request.bucket)
      this.waiting.delete(request)
      batch.push(request)
      elements += request.elements
    }
    if (batch.length === 0) return null
    this.#open.add(batch)
    return batch
  }

  /** Frees the slot of a batch whose call was given up. Its buckets stay apart until finish(). */
  release(batch) {
    this.#open.delete(batch)
    return this.next()
  }

  /** Closes a batch whose call has ended: its slot is free, and its buckets are. */
  finish(batch) {
    this.#open.delete(batch)
    for (const { bucket } of batch) this.#owned.delete(bucket)
    return this.next()
  }

  /** Reserves a slot if one is free, a waiting request can be taken, and a call is worth it. */
  next() { return this.#canTake() ? this.#reserve() : NOTHING }

  /** Reserves a slot for requests that were held long enough. */
  hurry() {
    this.#reserved = this.#canTake()
    return this.#reserved ? SERVE : NOTHING
  }

  /** Beside open calls, a call for less than half a share is not worth it: more requests are likely to come. */
  #reserve() {
    if (this.#open.size > 0 && this.waiting.size < Math.floor(this.#share() / 2)) return HOLD
    this.#reserved = true
    return SERVE
  }

  #canTake() {
    if (!this.#isFree()) return false
    for (const request of this.waiting) if (this.#isTakeable(request)) return true
    return false
  }

  #isTakeable({ bucket }) { return !this.#owned.has(bucket) }

  #isFree() { return !this.#reserved && this.#open.size < this.limit }

  /** How many requests a batch should have: all waiting and open ones divided by the slots, but MIN_SHARE if there are as many. */
  #share() {
    let all = this.waiting.size
    for (const batch of this.#open) all += batch.length
    return Math.max(Math.ceil(all / this.limit), Math.min(all, MIN_SHARE))
  }
}
