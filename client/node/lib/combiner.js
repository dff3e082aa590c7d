import { unless } from './database.js'
import { decision, misfit, text } from './decision.js'
import { Closed, Locked, Overloaded, invalid, isText, refusal } from './errors.js'
import { Limiter, OPTIONS, ask, known } from './limiter.js'
import { Queue } from './queue.js'

/** For so many ms few requests wait for company beside open calls. Most calls end sooner; the timer is for calls that are stalled. */
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
  _packs = true

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

// A call of requests that share it, and its answer: ratelimit_acquire_packed. Its arrays are explained at the type ratelimit.packed.

/** The arrays: of the decisions, of the errors, and of what joint requests have in common. */
export const PARTS = [
  ['elements', 'remaining', 'retry_after_us', 'reset_after_us', 'capacity', 'replayed', 'shadowed'],
  ['refused', 'error_codes', 'error_messages', 'error_details', 'error_hints'],
  ['requests', 'bindings', 'requests_allowed', 'requests_replayed', 'requests_shadowed'],
]
// JSON takes less time to read than arrays, in any driver.
const columns = `pg_catalog.json_build_array(${PARTS.map((names) => `pg_catalog.json_build_array(${names})`)})::text as parts`

/** The statement for requests that may share a call: all keyed or none, all joint or none. */
export function pack(batch) {
  const [{ joint, keyed }] = batch
  const charges = batch.flatMap((request) => request.charges)
  return {
    columns,
    call: 'ratelimit_acquire_packed($1::text[], $2::text[], $3::bigint[], $4::bigint[]::integer[], $5::text[])',
    values: [
      charges.map((c) => c.policy),
      charges.map((c) => c.key),
      charges.map((c) => c.cost),
      joint ? batch.map((request) => String(request.elements)) : null,
      keyed ? batch.map((request) => request.idempotencyKey) : null,
    ],
    once: keyed,
    decode(row) {
      const [decided, refused, wholes] = JSON.parse(text(row, 'parts'))
      return unpack(batch, rows(decided, 2), rows(refused, 0), rows(wholes, 2))
    },
  }
}

/** The answer of each request, a decision or an error, in the order of the batch. */
function unpack(batch, decided, refused, wholes) {
  const decisions = []
  for (const [element, remaining, retry_after, reset_after, capacity, replayed = false, shadowed = false] of decided) {
    decisions[element - 1] = decision({ allowed: retry_after === 0, remaining, retry_after, reset_after, capacity, replayed, shadowed })
  }
  let answers = decisions
  if (batch[0].joint) {
    let end = 0
    const own = batch.map((request) => decisions.slice(end, end += request.elements))
    answers = []
    for (const [number, binding, allowed, replayed = false, shadowed = false] of wholes) {
      const of = own[number - 1]
      if (!of?.[binding - 1]) throw misfit()
      answers[number - 1] = { ...of[binding - 1], allowed, replayed, shadowed, binding: binding - 1, decisions: of }
    }
  }
  for (const [number, ...error] of refused) answers[number - 1] = refusal(...error)
  if (answers.length !== batch.length || answers.includes(undefined)) throw misfit()
  return answers
}

/** Parallel arrays as rows. Those of flags, which come last, are absent or empty if none is set. */
function rows(arrays, flags) {
  const length = arrays[0]?.length ?? 0
  const isRight = (array, i) => (array?.length ?? 0) === length || (i >= arrays.length - flags && !array?.length)
  if (!arrays.every(isRight)) throw misfit()
  return Array.from({ length }, (_, i) => arrays.map((array) => array?.[i]))
}
