import { randomUUID } from 'node:crypto'
import { unless } from './database.js'
import { HOLD, flag, microseconds, wait } from './decision.js'
import { InvalidArgument, LeaseLost, UnknownPolicy } from './errors.js'
import { onAbort, timer } from './waiting.js'

const LEAST_PATIENCE = 1000 // ms, of a renewal, even if a third of the lease is less
const MAX_PAUSE = 1000 // ms, between two tries to renew
const STRAY_PAUSE = 1000 // ms, between two tries to release a stray
const LONGEST_STRAY = 86_400_000 // ms: longer leases end by themselves, when the database was away for a day
const MAX_STRAYS = 10_000

/**
 * The time for which a holder has its slots, as far as the client knows: a state machine without timers, clock or I/O, whose owner makes
 * the calls and passes the time, in ms. It has the names and the invariants of `tenure` in client/hold.go, and one more: at most one
 * renewal is under way, and none begins at `until` or later, or after the end.
 */
export class Tenure {
  #lease
  #isRenewing = false
  #isOver = false
  until
  due

  constructor(sent, heldFor) { this.#extend(sent, heldFor) }

  #extend(sent, heldFor) {
    this.#lease = heldFor
    this.until = sent + heldFor
    this.due = sent + heldFor / 3
  }

  over(now) { return this.#isOver ||= now >= this.until }

  /** Whether the owner must renew now. After true it calls renewed, failed or end. */
  begin(now) {
    if (this.over(now) || this.#isRenewing || now < this.due) return false
    return this.#isRenewing = true
  }

  /** When something is to be done: a renewal, or to see the end. */
  get next() { return this.#isRenewing ? this.until : Math.min(this.due, this.until) }

  /** How long a renewal that begins now may take: so long that another can follow, or until the end. */
  patience(now) { return Math.min(Math.max(this.#lease / 3, LEAST_PATIENCE), this.until - now) }

  /** The answer to a renewal that was sent at that time. What is over stays over. */
  renewed(sent, heldFor) {
    this.#isRenewing = false
    if (!this.#isOver) this.#extend(sent, heldFor)
  }

  /** A renewal without an answer. The pause is random, so that many holders of a database that was away do not ask at once. */
  failed(now) {
    this.#isRenewing = false
    this.due = now + Math.min(MAX_PAUSE, this.#lease / 10) * (1 + Math.random()) / 2
  }

  /** The answer to a renewal that the holder does not hold. */
  end() {
    this.#isRenewing = false
    this.#isOver = true
  }
}

const isAborted = Object.getOwnPropertyDescriptor(AbortSignal.prototype, 'aborted').get

/** Slots that this program holds, by a lease that it renews. Its type explains each field. */
class Hold {
  #database
  #bucket
  #controller = new AbortController()
  #tenure // none: nothing is held, and no call is made
  #clearTimer
  #renewal // a promise
  #releasing // a promise, until it fails
  #leaveCaller
  #failure // of the last renewal

  constructor(database, policy, key, holder, sent, row, callerSignal) {
    this.#database = database
    this.#bucket = [policy, key]
    this.holder = holder
    Object.assign(this, HOLD.decode(row))
    const { signal } = this.#controller
    // Whoever has the signal is told by the clock, too: after a freeze its timer may come too late.
    Object.defineProperties(signal, {
      aborted: { get: () => this.#isOver() },
      throwIfAborted: { value: () => { if (this.#isOver()) throw signal.reason } },
    })
    if (!this.allowed) return this.#stop(new LeaseLost('no slots are held'))
    if (!this.shadowed) this.#tenure = new Tenure(sent, milliseconds(row.held_for))
    if (callerSignal) this.#leaveCaller = onAbort(callerSignal, () => this.#stop(callerSignal.reason))
    this.#look()
  }

  get signal() {
    this.#isOver()
    return this.#controller.signal
  }

  release() {
    this.#stop()
    if (!this.#tenure) return Promise.resolve()
    this.#releasing ??= this.#release().catch((error) => {
      this.#releasing = undefined
      throw error
    })
    return this.#releasing
  }

  [Symbol.asyncDispose]() { return this.release() }

  async #release() {
    await this.#renewal
    try {
      await release(this.#database, ...this.#bucket, this.holder)
    } catch (error) {
      if (!isGone(error)) throw error
    }
  }

  /** Aborts the signal, and ends renewing. */
  #stop(reason) {
    this.#clearTimer?.()
    this.#leaveCaller?.()
    this.#controller.abort(reason)
  }

  /** Aborts the signal if the lease has ended, and returns whether it is aborted. */
  #isOver() {
    if (isAborted.call(this.#controller.signal)) return true
    if (!this.#tenure?.over(performance.now())) return false
    this.#stop(new LeaseLost('the lease was lost', {
      detail: 'It was not renewed in time, or the slots were reset or their policy dropped.',
      hint: 'Stop the work: another holder may have its slots.',
      cause: this.#failure,
    }))
    return true
  }

  /** Does what is due, and sets the timer for what is next. */
  #look() {
    if (this.#isOver() || !this.#tenure) return
    const now = performance.now()
    if (this.#tenure.begin(now)) {
      this.#renewal = this.#renew(now).then(() => {
        this.#renewal = undefined
        this.#look()
      })
    }
    this.#clearTimer?.()
    this.#clearTimer = timer(this.#tenure.next - now, () => this.#look(), { keepsAlive: false })
  }

  async #renew(sent) {
    try {
      const us = await renew(this.#database, ...this.#bucket, this.holder, this.#tenure.patience(sent))
      this.#failure = undefined
      if (us === null) this.#tenure.end()
      else this.#tenure.renewed(sent, milliseconds(us))
    } catch (error) {
      this.#failure = error
      if (isGone(error)) this.#tenure.end()
      else this.#tenure.failed(performance.now())
    }
  }
}

/** Whether the policy was dropped with its holders; another of its name may have tokens. */
const isGone = (error) => error instanceof UnknownPolicy || error instanceof InvalidArgument

/** Microseconds as milliseconds, rounded down: a lease is never counted as longer than it is. */
const milliseconds = (us) => Math.floor(Number(us) / 1000)

/**
 * Releases, in the background, the holders of calls without an answer: nobody else has their names. It makes a call at a time, so that
 * those of an outage are no burden when it ends, and keeps no process alive.
 */
export class Strays {
  #database
  #waiting = new Map() // by holder, in the order in which they are due
  #isBusy = false

  constructor(database) { this.#database = database }

  add(policy, key, holder) {
    if (this.#waiting.size >= MAX_STRAYS) return // its lease ends by itself
    const now = performance.now()
    this.#waiting.set(holder, { bucket: [policy, key], due: now, begun: now + STRAY_PAUSE, until: now + LONGEST_STRAY, isAnswered: false })
    if (!this.#isBusy) this.#work()
  }

  async #work() {
    this.#isBusy = true
    for (const [holder, stray] of this.#waiting) { // and those that are added meanwhile
      await new Promise((resolve) => timer(stray.due - performance.now(), resolve, { keepsAlive: false }))
      this.#waiting.delete(holder)
      const isOver = await this.#release(stray, holder)
      stray.due = performance.now() + STRAY_PAUSE
      if (!isOver && stray.due < stray.until) this.#waiting.set(holder, stray)
    }
    this.#isBusy = false
  }

  /**
   * Returns whether nothing more is to be done. The server may carry out a lost call late, so it is asked twice, and as long as it goes on
   * with a call that began before the second time.
   */
  async #release(stray, holder) {
    try {
      const mayEnd = stray.isAnswered && !await this.#database.goesOn(CALL, performance.now() - stray.begun)
      const isReleased = await release(this.#database, ...stray.bucket, holder)
      stray.isAnswered = true
      return isReleased || mayEnd
    } catch (error) {
      return this.#database.isClosed || isGone(error) || error instanceof TypeError || /^(42|3F)/.test(error.code) // no grant, or no function
    }
  }
}

const CALL = {
  columns: HOLD.columns,
  call: 'ratelimit_hold($1::text, $2::text, $3::text, $4::bigint)',
  once: true, // the server takes a call by the same holder for the same
}

/** Makes one call. */
export async function hold(database, strays, policy, key, cost, own, signal) {
  const holder = own ?? randomUUID(), sent = performance.now(), unended = []
  const holding = database.row({ ...CALL, values: [policy, key, holder, cost] }, { unended })
  try {
    const row = await unless(signal, holding)
    signal?.throwIfAborted()
    return new Hold(database, policy, key, holder, sent, row, signal)
  } catch (error) {
    const mayHold = signal?.aborted || unended.length > 0 || error instanceof TypeError // the caller has left, or no answer came that can be read
    if (mayHold && own === undefined) {
      holding.catch(() => {}).then(() => Promise.allSettled(unended)).then(() => strays.add(policy, key, holder))
    }
    throw error
  }
}

/** The length of the lease in microseconds, or null. */
export function renew(database, policy, key, holder, patience) {
  return database.row({
    columns: `${microseconds('ratelimit_renew')} as held_for`,
    decode: (row) => wait(row, 'held_for'),
    call: 'ratelimit_renew($1::text, $2::text, $3::text)',
    values: [policy, key, holder],
    once: true,
  }, { patience })
}

export function release(database, policy, key, holder) {
  return database.row({
    columns: 'ratelimit_release as held',
    decode: (row) => flag(row, 'held'),
    call: 'ratelimit_release($1::text, $2::text, $3::text)',
    values: [policy, key, holder],
    once: true,
  })
}
