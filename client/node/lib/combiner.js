import { unless } from './database.js'
import { Closed, Locked, Overloaded, invalid, isText } from './errors.js'
import { Limiter, OPTIONS, ask, known } from './limiter.js'
import { pack } from './packed.js'
import { Queue } from './queue.js'

/**
 * How long a few requests wait for company beside open calls, in ms. Most calls end sooner, which sends them, too; the timer is for
 * calls that are stalled.
 */
const LINGER = 5

/** How many buckets are asked for at a time after a locked bucket has failed their call. */
const MAX_APART = 8

/** A Limiter for many callers at once: requests of acquire and acquireAll that wait at the same moment share one call. */
export class Combiner extends Limiter {
  #queue
  #isClosed = false
  #serving = new Set() // promises
  #ending = new Set() // promises, of calls that were given up
  #turn // the next look at the queue
  #linger // a timer

  constructor(db, options) {
    const { callsInFlight = 2, maxWaiting = 10_000, callTimeoutMs = 5000, ...others } = known(options, ...OPTIONS, 'callsInFlight', 'maxWaiting')
    for (const [name, n] of Object.entries({ callsInFlight, maxWaiting })) {
      if (!Number.isSafeInteger(n) || n < 1) throw invalid(name, `is ${String(n)}.`, 'Pass a whole number, 1 or more.')
    }
    super(db, { callTimeoutMs, ...others })
    this.#queue = new Queue(Math.max(1, Math.min(callsInFlight, this._database.connections - 1)), maxWaiting)
  }

  /** How many requests wait for a call. */
  get waiting() { return this.#queue.waiting.size }

  /** Admits no more requests, and returns when all earlier ones are answered. The pool stays open. */
  async close() {
    this.#isClosed = true
    for (;;) {
      this.#look(true)
      const open = [...this.#serving, ...(this.waiting > 0 ? this.#ending : [])] // a request may wait for a bucket of those, too
      if (open.length === 0) break
      await Promise.race(open.map((promise) => promise.catch(() => {})))
    }
    clearImmediate(this.#turn)
    clearTimeout(this.#linger)
  }

  _ask(request, signal) {
    if (this.#isClosed) throw new Closed('limiter is closed')
    if (!request.canShare) return unless(signal, this.#track(this.#serving, ask(this._database, request)))
    if (this.#queue.refuses(request)) throw new Overloaded('too many requests wait', { detail: `${this.waiting} requests wait.` })
    const answer = new Promise((resolve, reject) => {
      request.resolve = resolve
      request.reject = reject
    })
    this.#queue.add(request)
    this.#lookSoon()
    return unless(signal, answer, () => { request.isGone = !this.#queue.leave(request) })
  }

  /** Looks at the queue when this turn of the loop ends: callers that were just answered often ask again in it. */
  #lookSoon() { this.#turn ??= setImmediate(() => this.#look()) }

  /** Starts the calls that are due. */
  #look(hurry = false) {
    clearImmediate(this.#turn)
    this.#turn = undefined
    for (let batch; (batch = this.#queue.take(hurry)); hurry = false) {
      clearTimeout(this.#linger)
      this.#linger = undefined
      this.#track(this.#serving, this.#serve(batch))
    }
    if (!this.#queue.isLingering) return
    this.#linger ??= setTimeout(() => {
      this.#linger = undefined
      this.#look(true)
    }, LINGER)
  }

  #track(promises, promise) {
    promises.add(promise)
    const done = () => promises.delete(promise)
    promise.then(done, done)
    return promise
  }

  /** Makes the call of a batch. */
  async #serve(batch) {
    const unended = []
    await this.#send(batch, unended)
    if (unended.length > 0) {
      this.#queue.giveUp(batch)
      this.#track(this.#ending, Promise.allSettled(unended).then(() => this.#finish(batch)))
      this.#lookSoon()
    } else this.#finish(batch)
  }

  #finish(batch) {
    this.#queue.finish(batch)
    this.#lookSoon()
  }

  /** Answers the requests of a batch. */
  async #send(batch, unended) {
    batch = batch.filter((request) => !request.isGone)
    if (batch.length <= 1) return this.#sendAlone(batch, unended)
    try {
      const answers = await this._database.row(pack(batch), { unended })
      answers.forEach((answer, i) => answer instanceof Error ? batch[i].reject(answer) : batch[i].resolve(answer))
    } catch (error) {
      if (isText(error)) return this.#sendAlone(batch, unended) // only the request with that text is to fail
      if (error instanceof Locked && batch.some(({ bucket }) => bucket !== batch[0].bucket)) return this.#sendApart(batch, unended)
      for (const request of batch) request.reject(error)
    }
  }

  /** Sends each request in a call of its own, one after another. */
  async #sendAlone(batch, unended) {
    for (const request of batch) {
      if (!request.isGone) await ask(this._database, request, unended).then(request.resolve, request.reject)
    }
  }

  /** Sends the requests for each bucket in a call of their own, a few at a time. Requests for a locked bucket are to fail, and no others. */
  async #sendApart(requests, unended) {
    const parts = new Map(requests.map(({ bucket }) => [bucket, []]))
    for (const request of requests) parts.get(request.bucket).push(request)
    const batches = parts.values()
    const sendSome = async () => {
      for (const batch of batches) await this.#send(batch, unended)
    }
    await Promise.all(Array.from({ length: MAX_APART }, sendSome))
  }
}
