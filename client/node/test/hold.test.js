// Slots: leases that are renewed, lost and given back. Time is moved by the tests.
import assert from 'node:assert/strict'
import { execFile } from 'node:child_process'
import { getEventListeners, once } from 'node:events'
import test from 'node:test'
import { promisify } from 'node:util'
import { Combiner, InvalidArgument, LeaseLost, Limiter, TimedOut, TooLate, UnknownPolicy } from '../index.js'
import { Tenure } from '../lib/hold.js'
import { connect, definePolicy, defineSlots, eventually, holders, pool, stuck, turn, whileOpen } from './kit.js'

const LONG = 60_000 // ms: no other timer of these tests is set for so long

/** Moves the time that the client sees. Timers of a minute or more fire only by it. */
function fakeTime(t) {
  const { now } = performance, { setTimeout, clearTimeout } = globalThis, timers = new Set()
  let ahead = 0
  t.mock.method(performance, 'now', () => now.call(performance) + ahead)
  t.mock.method(globalThis, 'setTimeout', (fire, ms, ...more) => {
    if (ms < LONG) return setTimeout(fire, ms, ...more)
    const timer = { fire, due: performance.now() + ms, ms, isRef: true, unref: () => { timer.isRef = false } }
    timers.add(timer)
    return timer
  })
  t.mock.method(globalThis, 'clearTimeout', (timer) => timers.delete(timer) || clearTimeout(timer))
  return {
    timers,
    /** The process is frozen for so long, in s: no timer fires. */
    freeze(seconds) { ahead += seconds * 1000 },
    pass(seconds) {
      ahead += seconds * 1000
      for (const timer of timers) if (timer.due <= performance.now() && timers.delete(timer)) timer.fire()
    },
  }
}

/** A pool whose calls of a function are counted, and may fail. */
function counting(name) {
  const counted = {
    calls: 0,
    async query(text, values) {
      if (text.includes(`${name}(`)) {
        counted.calls++
        await counted.before?.()
      }
      return pool.query(text, values)
    },
  }
  return counted
}

/** Half an hour of the leases of a policy is over for the server. */
const age = (policy) => pool.query("update ratelimit.leases set ends_at = ends_at - interval '30 minutes' where policy_id = (select id from ratelimit.policies where name = $1)", [policy])
const heldFor = async (policy) => (await pool.query('select extract(epoch from held_for)::float8 as s from ratelimit_holders($1)', [policy])).rows[0]?.s

for (const Kind of [Limiter, Combiner]) {
  test(`${Kind.name}: slots are held until they are released, and no others are granted`, async () => {
    const policy = await defineSlots(), limiter = new Kind(pool)
    const held = await limiter.hold(policy, 'k', { cost: 2n })
    const { holder, ...answer } = held
    assert.match(holder, /^[\da-f]{8}(-[\da-f]{4}){3}-[\da-f]{12}$/)
    assert.deepEqual(answer, { allowed: true, remaining: 1, retryAfter: 0, heldFor: 3600, capacity: 3, renewed: false, shadowed: false })
    assert.deepEqual([held.signal.aborted, await holders(policy)], [false, [holder]])

    const denied = await limiter.hold(policy, 'k', { cost: 2 })
    assert.deepEqual([denied.allowed, denied.remaining, denied.heldFor], [false, 1, 0])
    assert.ok(0 < denied.retryAfter && denied.retryAfter <= 3600)
    assert.ok(denied.signal.aborted && denied.signal.reason instanceof LeaseLost)
    await denied.release()
    assert.equal((await limiter.hold(policy, 'k', { cost: 4 })).retryAfter, null)

    const { signal } = held, aborted = once(signal, 'abort')
    await Promise.all([held.release(), held.release()])
    await aborted
    await held[Symbol.asyncDispose]()
    assert.deepEqual([signal.reason.name, await holders(policy)], ['AbortError', []])
    if (Kind === Combiner) await limiter.close()
  })
}

test('renew and release are for holders of their own', async () => {
  const policy = await defineSlots(), limiter = new Limiter(pool)
  await pool.query("select ratelimit_hold($1, 'k', 'job 7, attempt 1')", [policy])
  assert.equal(await limiter.renew(policy, 'k', 'job 7, attempt 1'), 3600)
  assert.deepEqual([await limiter.release(policy, 'k', 'job 7, attempt 1'), await limiter.release(policy, 'k', 'job 7, attempt 1')], [true, false])
  assert.equal(await limiter.renew(policy, 'k', 'job 7, attempt 1'), null)
  await assert.rejects(limiter.renew(policy, 'k', 7), InvalidArgument)
  await assert.rejects(limiter.release('none', 'k', 'h'), UnknownPolicy)
  assert.deepEqual(await holders(policy), [])
})

test('a lease is renewed when a third of it is over, and by timers that keep no process alive', async (t) => {
  const time = fakeTime(t), policy = await defineSlots(), db = counting('ratelimit_renew')
  const held = await new Limiter(db, { retry: true }).hold(policy, 'k')
  await age(policy)
  time.pass(1000)
  assert.equal(db.calls, 0)
  assert.ok([...time.timers].every((timer) => !timer.isRef), 'a timer keeps the process alive')
  time.pass(201)
  await eventually(async () => await heldFor(policy) > 1900)
  await eventually(() => time.timers.size === 1) // that of the next renewal; of one under way there are two
  time.pass(3000)
  assert.equal(held.signal.aborted, false, 'the lease counts from the renewal')
  await held.release()
  assert.deepEqual([db.calls, await holders(policy)], [2, []])
  assert.equal(time.timers.size, 0)
})

test('after a freeze that was longer than the lease, the first look at the signal finds it aborted', async (t) => {
  const time = fakeTime(t), policy = await defineSlots(), limiter = new Limiter(pool)
  const looks = [
    ({ held }) => held.signal.aborted,
    ({ signal }) => signal.aborted,
    ({ signal }) => { assert.throws(() => signal.throwIfAborted(), LeaseLost); return true },
  ]
  for (const look of looks) {
    const held = await limiter.hold(policy, 'k'), { signal } = held
    time.freeze(3601)
    assert.ok(look({ held, signal }))
    assert.ok(signal.reason instanceof LeaseLost)
    await held.release()
  }
  assert.equal(time.timers.size, 0)
  assert.deepEqual(await holders(policy), [], 'what is lost here is released there')
})

test('a renewal finds that the slots were reset, or that their policy was dropped or is no policy of slots any more', async (t) => {
  const time = fakeTime(t), limiter = new Limiter(pool)
  const drop = 'select ratelimit_drop_policy($1)'
  for (const lose of ["select ratelimit_reset($1, 'k')", drop, `with dropped as materialized (${drop}) select ratelimit_define_policy($1, 1, 1, '1 day') from dropped`]) {
    const policy = await defineSlots(), held = await limiter.hold(policy, 'k'), { signal } = held
    await pool.query(lose, [policy])
    const aborted = once(signal, 'abort')
    time.pass(1201)
    await aborted
    assert.ok(signal.reason instanceof LeaseLost, lose)
    await held.release()
    assert.equal(time.timers.size, 0)
  }
})

test('a renewal that fails is tried again until the lease ends, and not after that', async (t) => {
  const time = fakeTime(t), policy = await defineSlots(), db = counting('ratelimit_renew')
  const held = await new Limiter(db, { retry: true }).hold(policy, 'k')
  db.before = () => { throw Object.assign(new Error('down'), { code: '57P03', severity: 'FATAL' }) }
  time.pass(1201)
  await eventually(() => db.calls > 6) // three tries each
  assert.equal(held.signal.aborted, false)
  time.pass(2400)
  assert.ok(held.signal.aborted)
  await held.release()
  assert.ok(held.signal.reason instanceof LeaseLost)
  assert.equal(held.signal.reason.cause.message, 'down')
})

test('release waits for a renewal under way', async (t) => {
  const time = fakeTime(t), policy = await defineSlots(), db = counting('ratelimit_renew')
  let go
  db.before = () => new Promise((resolve) => { go = resolve })
  const held = await new Limiter(db, { retry: true }).hold(policy, 'k')
  time.pass(1201)
  await eventually(() => go)
  const released = held.release().then(() => 'released')
  assert.equal(await Promise.race([released, holders(policy)]).then((first) => first.length), 1, 'it still holds')
  go()
  assert.equal(await released, 'released')
  assert.deepEqual(await holders(policy), [])
})

test('a release that failed can be repeated', async () => {
  const policy = await defineSlots(), db = counting('ratelimit_release'), held = await new Limiter(db, { retry: true }).hold(policy, 'k')
  db.before = () => { throw new Error('down') }
  await assert.rejects(held.release(), /down/)
  assert.equal((await holders(policy)).length, 1)
  db.before = undefined
  await held.release()
  assert.deepEqual(await holders(policy), [])
})

test('under a policy that watches, what would be denied makes no more calls', async (t) => {
  const time = fakeTime(t), policy = await defineSlots(1, '1 hour', true), db = counting('ratelimit_re') // renew and release are none of it
  const limiter = new Limiter(db, { retry: true }), first = await limiter.hold(policy, 'k'), leaving = new AbortController()
  const held = await limiter.hold(policy, 'k', { signal: leaving.signal })
  assert.deepEqual([held.allowed, held.shadowed, held.heldFor, time.timers.size], [true, true, 3600, 1])
  time.freeze(9999)
  assert.equal(held.signal.aborted, false)
  const queries = t.mock.method(db, 'query')
  await held.release()
  assert.deepEqual([queries.mock.callCount(), held.signal.aborted, getEventListeners(leaving.signal, 'abort').length], [0, true, 0])
  await first.release()
})

test('errors', async () => {
  const slots = await defineSlots(), bucket = await definePolicy(), limiter = new Limiter(pool)
  await assert.rejects(limiter.hold('none', 'k'), (error) => error instanceof UnknownPolicy && error.code === 'RL001')
  const calls = [
    () => limiter.hold(bucket, 'k'), () => limiter.renew(bucket, 'k', 'h'), () => limiter.release(bucket, 'k', 'h'),
    () => limiter.acquire(slots, 'k'), () => limiter.hold(slots, 'k', { cost: 0 }), () => limiter.hold(slots, ''),
  ]
  for (const call of calls) {
    await assert.rejects(call(), (error) => error instanceof InvalidArgument && error.code === '22023' && error.hint !== undefined)
  }
  await assert.rejects(limiter.hold(slots, 'k', { holder: 5 }), InvalidArgument)
  const connection = await pool.connect()
  await assert.rejects(new Limiter(connection).hold(slots, 'k'), /needs a pool/)
  connection.release()
})

test('when the signal of a hold is aborted, its signal is, and the lease is not renewed', async (t) => {
  const time = fakeTime(t), policy = await defineSlots(), leaving = new AbortController()
  const held = await new Limiter(pool).hold(policy, 'k', { signal: leaving.signal })
  leaving.abort(new Error('enough'))
  assert.deepEqual([held.signal.aborted, held.signal.reason.message, time.timers.size], [true, 'enough', 0])
  assert.equal((await holders(policy)).length, 1)
  await held.release()
  assert.deepEqual(await holders(policy), [])
})

test('what may have been granted to a caller that has left is released', async () => {
  const policy = await defineSlots(), leaving = new AbortController(), own = connect({ max: 1 })
  await new Limiter(pool).hold(policy, 'k').then((held) => held.release()) // so that there is a row
  await whileOpen("select ratelimit_hold($1, 'k', 'other')", [policy], async (unlock) => {
    const holding = new Limiter(own).hold(policy, 'k', { signal: leaving.signal })
    holding.catch(() => {})
    await eventually(async () => (await stuck('ratelimit_hold'))[0])
    leaving.abort()
    await assert.rejects(holding, { name: 'AbortError' })
    await unlock()
  })
  await own.query('select') // behind the hold, on the only connection
  await eventually(async () => (await holders(policy)).length === 0)
})

test('what may have been granted by a call that was given up is released', async (t) => {
  const policy = await defineSlots(), answers = [], db = {
    query: async (text, values) => { // the answer of a hold is late
      const answer = await pool.query(text, values)
      if (text.includes('ratelimit_hold(')) await new Promise((resolve) => answers.push(resolve))
      return answer
    },
  }
  t.mock.method(globalThis, 'setTimeout', ((setTimeout) => (fire, ms, ...more) => setTimeout(fire, ms === 3_600_000 ? 0 : ms, ...more))(setTimeout))
  await assert.rejects(new Combiner(db, { callTimeoutMs: 3_600_000, retry: true }).hold(policy, 'k'), TimedOut)
  t.mock.restoreAll()
  const [answered] = await eventually(() => answers.length > 0 && answers)
  assert.equal((await holders(policy)).length, 1)
  answered()
  await eventually(async () => (await holders(policy)).length === 0)
})

test('what the server grants long after the call was given up is released', async (t) => {
  const time = fakeTime(t), policy = await defineSlots(), own = connect()
  const query = t.mock.method(own.Client.prototype, 'query'), cancel = t.mock.method(own.Client.prototype, 'cancel', () => {}) // on its way it is lost
  const releases = () => query.mock.calls.filter(({ arguments: [query] }) => query.text?.includes('ratelimit_release(')).length
  await whileOpen("select ratelimit_hold($1, 'k', 'other')", [policy], async (unlock) => {
    const holding = new Limiter(own, { callTimeoutMs: 3_600_000 }).hold(policy, 'k')
    holding.catch(() => {})
    await eventually(async () => (await stuck('ratelimit_hold'))[0])
    time.pass(3600)
    await assert.rejects(holding, TimedOut)
    await eventually(() => releases() > 2) // twice nothing to release would not tell
    await unlock()
  })
  assert.equal(cancel.mock.callCount(), 1)
  const goesOn = "select from pg_stat_activity where state = 'active' and pid <> pg_backend_pid() and query like '%from ratelimit_hold(%'"
  await eventually(async () => (await pool.query(goesOn)).rowCount === 0)
  await eventually(async () => (await holders(policy)).length === 0)
})

/** A pool that loses the answers of hold, and is away from then on, until it is back. */
function losing() {
  const db = {
    isAway: false, releases: 0, open: 0, mostOpen: 0,
    async query(text, values) {
      const isRelease = text.includes('ratelimit_release(')
      db.releases += isRelease
      db.mostOpen = Math.max(db.mostOpen, db.open += isRelease)
      try {
        if (isRelease) await db.release?.()
        const { isAway } = db
        if (text.includes('ratelimit_hold(')) db.isAway = await db.hold?.(values) ?? true
        const result = isAway || await pool.query(text, values)
        if (db.isAway) throw Object.assign(new Error('read ECONNRESET'), { code: 'ECONNRESET' })
        return result
      } finally {
        db.open -= isRelease
      }
    },
  }
  return db
}

/** All pauses are over at once. */
const hurry = (t) => t.mock.method(globalThis, 'setTimeout', ((setTimeout) => (fire, _, ...more) => setTimeout(fire, 0, ...more))(setTimeout))

test('what may have been granted by calls whose answers were lost is released when the database is back, a call at a time', async (t) => {
  const policy = await defineSlots(10), db = losing(), limiter = new Limiter(db, { retry: true })
  hurry(t)
  const outcomes = await Promise.allSettled(Array.from({ length: 10 }, () => limiter.hold(policy, 'k')))
  assert.ok(outcomes.every(({ reason }) => reason?.code === 'ECONNRESET'))
  assert.equal((await holders(policy)).length, 10, 'all were committed')
  await eventually(() => db.releases > 50) // three tries each
  db.isAway = false
  await eventually(async () => (await holders(policy)).length === 0)
  const { releases } = await eventually(() => db.open === 0 && db)
  await turn()
  assert.deepEqual([db.mostOpen, db.releases - releases], [1, 0])
})

test('a lost call that the server carries out later is released, too', async (t) => {
  const policy = await defineSlots(), db = losing(), limiter = new Limiter(db, { retry: true })
  let lost
  hurry(t)
  db.hold = (values) => { lost = values; throw new Error('read ECONNRESET') }
  db.release = async () => db.releases === 2 && pool.query('select ratelimit_hold($1, $2, $3, $4)', lost)
  await assert.rejects(limiter.hold(policy, 'k'), /ECONNRESET/)
  await eventually(async () => db.releases === 2 && db.open === 0)
  assert.deepEqual(await holders(policy), [])
})

test('a hold that the server has refused, or denied, releases nothing', async () => {
  const policy = await defineSlots(1), bucket = await definePolicy(), db = counting('ratelimit_release'), limiter = new Limiter(db, { retry: true })
  for (const refused of ['none', bucket]) await assert.rejects(limiter.hold(refused, 'k'))
  const held = await limiter.hold(policy, 'k')
  assert.equal((await limiter.hold(policy, 'k')).allowed, false)
  await turn()
  assert.equal(db.calls, 0)
  await held.release()
})

test('1,000 holds, of which some are given up, leave nothing behind', async (t) => {
  const time = fakeTime(t), policy = await defineSlots(1000), own = connect({ max: 8 }), limiter = new Combiner(own, { callTimeoutMs: 3_600_000 })
  const stay = new AbortController()
  const outcomes = await Promise.all(Array.from({ length: 1000 }, async (_, i) => {
    const leaving = new AbortController(), signal = i % 3 === 0 ? leaving.signal : stay.signal
    const holding = limiter.hold(policy, `k${i % 7}`, { signal })
    if (i % 6 === 0) setImmediate(() => leaving.abort())
    try {
      const held = await holding
      if (i % 3 === 0) leaving.abort()
      await held.release()
      return held.signal.aborted
    } catch (error) {
      return error.name
    } finally {
      assert.equal(getEventListeners(leaving.signal, 'abort').length, 0)
    }
  }))
  assert.deepEqual([...new Set(outcomes)].sort(), ['AbortError', true].sort())
  await eventually(async () => (await holders(policy)).length === 0)
  await eventually(() => own.waitingCount === 0 && own.idleCount === own.totalCount) // the last release may be on its way back
  await limiter.close()
  assert.deepEqual([time.timers.size, getEventListeners(stay.signal, 'abort').length], [0, 0])
  await eventually(() => !process.getActiveResourcesInfo().includes('Timeout'))
})

test('a pool that was closed is asked once', async (t) => {
  const own = connect({ max: 1 }), limiter = new Limiter(own), timers = t.mock.method(globalThis, 'setTimeout').mock
  await own.end()
  const asked = t.mock.method(own, 'query').mock
  await assert.rejects(limiter.peek('p', 'k'), /after calling end/)
  assert.equal(asked.callCount(), 1)
  const before = timers.callCount()
  await assert.rejects(limiter.hold('p', 'k'), /after calling end/)
  await turn()
  assert.equal(asked.callCount(), 2)
  assert.deepEqual(timers.calls.slice(before).filter(({ arguments: [, ms] }) => ms > 5), [], 'nor later')
})

test('a hold that is forgotten, and one whose answer was lost, keep no process alive', async () => {
  const policy = await defineSlots()
  const program = `import pg from 'pg'
    import { Limiter } from 'pgratelimit'
    const pool = new pg.Pool({ allowExitOnIdle: true })
    console.log((await new Limiter(pool).hold('${policy}', 'k')).allowed)
    const away = async (...args) => { await pool.query(...args); throw new Error('lost') }
    await new Limiter({ query: away }, { retry: true }).hold('${policy}', 'k').catch((error) => console.log(error.message))`
  const { stdout } = await promisify(execFile)(process.execPath, ['--input-type=module', '-e', program], { cwd: new URL('.', import.meta.url), timeout: 120_000 })
  assert.deepEqual([stdout, (await holders(policy)).length >= 1], ['true\nlost\n', true])
})

test('a tenure', () => {
  const tenure = new Tenure(100, 3000)
  assert.deepEqual([tenure.begin(1099), tenure.next, tenure.begin(1100), tenure.begin(1100), tenure.next], [false, 1100, true, false, 3100])
  assert.deepEqual([tenure.patience(1100), tenure.patience(3000)], [1000, 100])
  tenure.failed(1200)
  assert.ok(1350 <= tenure.next && tenure.next <= 1500, `${tenure.next}`)
  assert.ok(tenure.begin(1500))
  tenure.renewed(1500, 6000)
  assert.deepEqual([tenure.next, tenure.over(7499), tenure.over(7500)], [3500, false, true])
  tenure.renewed(7499, 6000)
  assert.deepEqual([tenure.over(7499), tenure.begin(7499)], [true, false], 'what was over stays over')
  const ended = new Tenure(0, 3000)
  ended.end()
  assert.ok(ended.over(1))
  const year = new Tenure(0, 31_557_600_000 * 1000)
  assert.equal(year.patience(0), 31_557_600_000 * 1000 / 3)
})

test('a caller that waits for slots gets them when they are released, and fails if no wait helps', async () => {
  const policy = await defineSlots(1), limiter = new Limiter(pool), held = await limiter.hold(policy, 'k'), leaving = new AbortController()
  const waiting = limiter.holdWait(policy, 'k'), left = limiter.holdWait(policy, 'k', { signal: leaving.signal })
  leaving.abort(new Error('gone'))
  await assert.rejects(left, /gone/)
  await held.release()
  const next = await waiting
  assert.ok(next.allowed)
  await next.release()
  await assert.rejects(limiter.holdWait(policy, 'k', { cost: 2 }), TooLate)
})

test('a lease under a holder of your own passes from one task to another', async () => {
  const policy = await defineSlots(1), limiter = new Limiter(pool), stop = new AbortController()
  const first = await limiter.hold(policy, 'k', { holder: 'job:7', signal: stop.signal })
  assert.deepEqual([first.renewed, first.holder], [false, 'job:7'])
  stop.abort()
  const second = await new Limiter(pool).hold(policy, 'k', { holder: 'job:7' })
  assert.deepEqual([second.allowed, second.renewed, (await limiter.hold(policy, 'k')).allowed], [true, true, false])
  const lose = async (...args) => { await pool.query(...args); throw new TypeError('lost') }
  const lossy = new Limiter({ query: lose }, { retry: true })
  await assert.rejects(lossy.hold(policy, 'k', { holder: 'job:7' }), /lost/)
  await turn()
  assert.deepEqual(await holders(policy), ['job:7'], 'not released behind its back')
  await second.release()
  assert.deepEqual(await holders(policy), [])
})
