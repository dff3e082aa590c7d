import assert from 'node:assert/strict'
import { readFileSync, rmSync, writeFileSync } from 'node:fs'
import test from 'node:test'
import { left, pool } from './kit.js'

test('the README is a program that works', async () => {
  await pool.query(`select ratelimit_define_policy('api', 100, 1, '1 hour'), ratelimit_define_policy('jobs', 5, lease => '5 minutes'),
    ratelimit_define_policy('minute', 100000, 1, '1 hour'), ratelimit_define_policy('month', 5000000, 1, '1 hour')`)
  const text = readFileSync(new URL('../README.md', import.meta.url), 'utf8')
  const blocks = [...text.matchAll(/^```js\n(.*?)^```$/gms)].map(([, block]) => block)
  assert.equal(blocks.length, 8)
  const file = new URL('readme.mjs', import.meta.url) // beside the packages that it imports
  const printed = []
  const { log } = console
  writeFileSync(file, `${blocks.join('').replace('.listen(3000)', '')}\nexport { pool, sql, limiter, adapted, limited }\n`)
  try {
    console.log = (...values) => printed.push(values.join(' '))
    const program = await import(file)
    assert.ok((await program.adapted.acquire('api', 'user:42')).allowed)
    await Promise.all([program.pool.end(), program.sql.end()])
  } finally {
    console.log = log
    rmSync(file)
  }
  assert.deepEqual(printed, ['95 tokens left', 'one of 5', 'api '])
  assert.equal(await left('api', 'user:42'), 93)
  assert.equal(await left('jobs', 'tenant:7'), 5)
  assert.deepEqual([await left('minute', 'team:7'), await left('month', 'team:7')], [99_100, 4_999_100])
})
