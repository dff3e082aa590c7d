import { text } from './decision.js'
import { InvalidArgument, NotReady, UnknownPolicy, invalid } from './errors.js'

const HOLD = ['hold', 'renew', 'release']
const FUNCTIONS = { hold: HOLD, holdWait: HOLD, wait: ['reserve', 'settle'] } // of methods that differ
const isOfSlots = (call) => call === 'holdWait' || HOLD.includes(call)

/** Each function by name, as the session finds it; null where there is none. */
const FOUND = `select current_user::text as role, pg_catalog.json_agg(pg_catalog.json_build_array(
         wanted.name, found.schema, found.signature, found.visible, found.usage, found.execute))::text as functions
  from pg_catalog.unnest($1::text::text[]) as wanted (name)
  left join lateral (
    select pg_catalog.quote_ident(n.nspname) as schema,
           pg_catalog.format('%I(%s)', p.proname, pg_catalog.oidvectortypes(p.proargtypes)) as signature,
           $2::text is not null or pg_catalog.pg_function_is_visible(p.oid) as visible,
           pg_catalog.has_schema_privilege(n.oid, 'usage') as usage,
           pg_catalog.has_function_privilege(p.oid, 'execute') as execute
      from pg_catalog.pg_proc as p
      join pg_catalog.pg_namespace as n on n.oid = p.pronamespace
     where p.proname = wanted.name and n.nspname = coalesce($2::text, n.nspname)
     order by pg_catalog.pg_function_is_visible(p.oid) desc
     limit 1) as found on true`

/** Rejects with all that the calls of a limiter lack in its database, and the statements that help. */
export async function check(limiter, database, policies, calls, packs) {
  const lends = calls.some(isOfSlots), lendsNot = !calls.every(isOfSlots), asking = lends ? 'renew' : 'acquire'
  const wanted = new Set([...calls, ...(policies.length > 0 ? [asking] : [])].flatMap((call) => {
    if (typeof limiter[call] !== 'function') throw invalid('calls', `has ${String(call)}.`, 'Pass names of methods, such as acquire.')
    return FUNCTIONS[call] ?? [call.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`)]
  }))
  if (packs && (wanted.has('acquire') || wanted.has('acquire_all'))) wanted.add('acquire_packed')
  const names = [...wanted].map((name) => `ratelimit_${name}`), { schema } = database
  const row = await database.row({ statement: FOUND, call: 'check', values: [`{${names}}`, schema ?? null], once: true })
  const role = text(row, 'role'), found = JSON.parse(text(row, 'functions')), lacks = []
  if (found.every(([, schema]) => schema === null)) {
    const place = schema === undefined ? 'this database' : `schema "${schema}" of this database`
    throw new NotReady([`pgratelimit is not installed in ${place}: run migrations/psql/install.sql`])
  }
  const schemas = found.filter(([, schema, , , usage]) => schema !== null && !usage).map(([, schema]) => schema)
  for (const name of new Set(schemas)) lacks.push(`grant usage on schema ${name} to "${role}";`)
  for (const [name, schema, signature, visible, usage, execute] of found) {
    if (schema === null) lacks.push(`${name} is missing: bring pgratelimit up to date`)
    else if (usage && !visible) lacks.push(`${name} is in schema ${schema}, which is not on search_path: name it with the option schema`)
    if (schema !== null && !execute) lacks.push(`grant execute on function ${schema}.${signature} to "${role}";`)
  }
  const used = [`ratelimit_${asking}`, ...(packs ? ['ratelimit_acquire_packed'] : [])] // by the calls that ask policies
  const canAsk = found.every(([name, schema, , visible, usage, execute]) => !used.includes(name) || (schema !== null && visible && usage && execute))
  if (canAsk) for (const policy of policies) lacks.push(...await lacksOf(limiter, policy, lends, lendsNot))
  if (lacks.length > 0) throw new NotReady(lacks)
}

/** Asks a policy for nothing, by a call that takes nothing. If calls of both kinds are made, it may be for the others. */
async function lacksOf(limiter, policy, lends, lendsNot) {
  try {
    if (lends) await limiter.renew(policy, 'check', 'check')
    else await limiter.acquire(policy, 'check', { cost: 0 })
    return []
  } catch (error) {
    if (error instanceof UnknownPolicy) return [`no policy is named "${policy}": see the names in ratelimit_policies(), or define it`]
    if (!(error instanceof InvalidArgument)) throw error
    if (!lends) return [`the policy "${policy}" lends slots: call hold`]
    return lendsNot ? [] : [`the policy "${policy}" lends no slots: define it with a lease, or call acquire`]
  }
}
