// It goes on for RATELIMIT_TORTURE_MINUTES, through RATELIMIT_TEST_PROXY if there is one (host:port).
import assert from 'node:assert/strict'
import test from 'node:test'
import { Combiner } from '../index.js'
import { connect, definePolicy, eventually, left, pool } from './kit.js'

const names = Array.from({ length: 50 }, (_, i) => `k${i}`)

test('1,000 callers, with connections killed and callers leaving: no token is lost or minted, and nothing is left behind', async () => {
  const [host, port] = process.env.RATELIMIT_TEST_PROXY?.split(':') ?? []
  const own = connect({ application_name: 'storm', ...(port && { host, port }) })
  const until = Date.now() + 60_000 * Number(process.env.RATELIMIT_TORTURE_MINUTES ?? 0)
  do {
    const policy = await definePolicy(1_000_000, 1, '1 day'), combiner = new Combiner(own, { callTimeoutMs: 3_600_000 })
    const told = new Map(names.map((key) => [key, [0, 0]]))
    let settled = 0
    const callers = Array.from({ length: 1000 }, async (_, i) => {
      const key = names[i % 50], keyed = i % 4 === 0, counts = told.get(key)
      for (let n = 0; n < 3; n++) {
        const leaving = new AbortController()
        const timer = i % 5 === 0 ? setTimeout(() => leaving.abort(), Math.random() * 50) : undefined
        try {
          const options = { idempotencyKey: keyed ? `${i}/${n}` : undefined, signal: leaving.signal }
          const d = i % 3 === 0
            ? await combiner.acquireAll([{ policy, key }], options)
            : await combiner.acquire(policy, key, options)
          assert.ok(d.allowed)
          counts[0]++
        } catch (error) {
          assert.match(`${error.name} ${error.code} ${error.message}`, /AbortError|57P01|terminat|not queryable|timeout|TimedOut|ECONN|EPIPE/)
          counts[1]++ // it may be charged
        }
        clearTimeout(timer)
        settled++
      }
    })
    for (const share of [300, 900, 1500, 2100]) {
      await eventually(() => settled >= share)
      await pool.query("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'storm'")
    }
    await Promise.all(callers)
    assert.equal(settled, 3000)
    for (const key of names) {
      const counts = told.get(key) // it answers again after the storm
      await eventually(() => combiner.acquire(policy, key).then(() => ++counts[0], () => { counts[1]++ }))
    }
    await combiner.close()
    await pool.query("select pg_terminate_backend(pid, 10000) from pg_stat_activity where application_name = 'storm'") // none still takes tokens
    let unanswered = 0
    for (const [key, [granted, unknown]] of told) {
      const taken = 1_000_000 - await left(policy, key)
      assert.ok(granted <= taken && taken <= granted + unknown, `${key}: ${granted} granted, ${unknown} unknown, ${taken} taken`)
      unanswered += unknown
    }
    assert.ok(unanswered > 0, 'no call was killed')
    assert.equal(combiner.waiting, 0)
    await eventually(() => own.totalCount === own.idleCount) // every connection is given back
    assert.ok(!process.getActiveResourcesInfo().includes('Timeout'), 'a timer is set')
  } while (Date.now() < until)
})
