import assert from 'node:assert/strict'
import test from 'node:test'
import { PGlite } from '@electric-sql/pglite'
import { Combiner, UnknownPolicy } from '../index.js'
import { installation } from './kit.js'

test('PGlite answers like a server', async () => {
  const db = await PGlite.create()
  await db.exec(installation())
  await db.exec("select ratelimit_define_policy('api', 10, 1, '1 day')")
  const combiner = new Combiner(db)
  assert.deepEqual((await Promise.all(['a', 'b', 'a'].map((key) => combiner.acquire('api', key)))).map((d) => d.remaining), [9, 9, 8])
  assert.equal((await combiner.acquireAll([{ policy: 'api', key: 'a', cost: 9 }, { policy: 'api', key: 'b' }])).binding, 0)
  await assert.rejects(combiner.acquire('none', 'a'), UnknownPolicy)
  await combiner.close()
  await db.close()
})
