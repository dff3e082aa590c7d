/** The most elements of one call. It bounds its locks and the wait of its callers; a batch below it still takes a whole joint request. */
const MAX_BATCH = 256

/** So many requests make a call worth its fixed cost, which is then about a quarter of their cost. */
const MIN_SHARE = 32

/**
 * Decides which requests share a call, and when a call is made. It is a state machine without timers or I/O: its owner makes the calls,
 * and calls take() after each change until it returns null.
 *
 * A request has a bucket (its name; all buckets of a joint request are one, named after them all), elements (its size in a call), keyed
 * and joint. It waits until take() puts it into a batch, whose buckets belong to it until finish(), and whose place until then or giveUp().
 *
 * Invariants, between any two methods:
 *
 * 1. At most `limit` places are in use, one for each open batch.
 * 2. A bucket belongs to at most one unfinished batch. So a stalled call holds up its own buckets only.
 * 3. Requests for one bucket are taken in order of arrival. Requests with and without an idempotency key are two orders.
 * 4. A batch that has MAX_BATCH elements takes no more. Its requests are all keyed or none is, and all joint or none.
 * 5. At most `maxWaiting` requests wait, besides one that can be sent at once.
 */
export class Queue {
  waiting = new Set() // in order of arrival
  isLingering = false // the last take left requests to linger for company: call it soon with hurry
  #open = new Set()
  #owned = new Set() // buckets of unfinished batches

  constructor(limit, maxWaiting) {
    this.limit = limit
    this.maxWaiting = maxWaiting
  }

  /** Whether another request must not wait. One that can be sent at once is never refused. */
  refuses({ bucket }) {
    if (this.waiting.size < this.maxWaiting) return false
    return this.#open.size >= this.limit || this.#owned.has(bucket) || this.#canTake()
  }

  add(request) { this.waiting.add(request) }

  /** Takes back a request that was not sent yet, and returns whether it was so. */
  leave(request) { return this.waiting.delete(request) }

  /**
   * Opens the next batch: requests from the head of the line. It is null if no place is free or no request can be sent; or, without
   * hurry, if another call is not worth it beside the open calls: below half a share, because more requests are likely to come.
   */
  take(hurry = false) {
    this.isLingering = false
    if (this.#open.size >= this.limit) return null
    const batch = [], mine = new Set(), share = this.#share()
    if (this.#open.size > 0 && this.waiting.size < Math.floor(share / 2) && !hurry) {
      this.isLingering = this.#canTake()
      return null
    }
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

  /** Frees the place of a batch whose call has taken too long. Its buckets stay apart until finish(). */
  giveUp(batch) { this.#open.delete(batch) }

  /** Closes a batch whose call has ended: its place is free, and so are its buckets. */
  finish(batch) {
    this.#open.delete(batch)
    for (const { bucket } of batch) this.#owned.delete(bucket)
  }

  #canTake() {
    for (const { bucket } of this.waiting) if (!this.#owned.has(bucket)) return true
    return false
  }

  /** How many requests a batch should have: all waiting and open ones divided by the places, but MIN_SHARE if there are as many. */
  #share() {
    let all = this.waiting.size
    for (const batch of this.#open) all += batch.length
    return Math.max(Math.ceil(all / this.limit), Math.min(all, MIN_SHARE))
  }
}
