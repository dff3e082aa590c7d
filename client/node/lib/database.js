import { createHash } from 'node:crypto'
import { setTimeout as sleep } from 'node:timers/promises'
import { flag } from './decision.js'
import { TimedOut, isTransient, isUnknown, kindOf, translate } from './errors.js'
import { duration, onAbort, timer } from './waiting.js'

const MAX_TRIES = 3
const MAX_BACKOFF = 50 // ms, after the first try

/** Sends statements of one row to a database: a pool, a connection, or anything with `query(text, values)`. */
export class Database {
  #db
  #isPool
  #schema
  #retry
  #timeout
  #prepares

  constructor(db, { schema, retry, callTimeoutMs = Infinity } = {}) {
    if (typeof db?.query !== 'function') {
      const found = `the first argument is ${kindOf(db)}, and has no query(text, values)`
      throw new TypeError(`pgratelimit: ${found}: pass a Pool of pg; for other drivers README.md has adapters`)
    }
    this.#db = db
    this.#isPool = typeof db.connect === 'function' && typeof db.totalCount === 'number' // a Pool of pg
    this.schema = schema
    this.#schema = schema === undefined ? '' : `"${schema.replaceAll('"', '""')}".`
    this.#retry = retry ?? this.#isPool
    this.#timeout = duration('callTimeoutMs', callTimeoutMs)
    this.#prepares = this.#isPool // on a connection the error of a pooler would end a transaction
  }

  get isClosed() { return this.#isPool && this.#db.ending }

  /** How many connections it has, if that is known. */
  get connections() { return this.#isPool ? this.#db.options.max : Infinity }

  /** Whether each statement is a transaction of its own, on one of several connections. */
  get isPool() { return this.#isPool || this.#retry }

  /**
   * Selects columns from a call of a function, or sends a statement of its own, and decodes the row. It is sent again, where
   * each statement is a transaction of its own, after an error which means that nothing happened; and after the loss of a connection, if the call does the same however often it
   * is sent (`once`). Calls whose outcome is unknown are pushed to `unended`, as promises until they have ended. A call is given up
   * after `patience` ms, if that is less than callTimeoutMs.
   */
  async row({ columns, statement, decode = (row) => row, call, values, once = false }, { unended = [], patience = Infinity } = {}) {
    const timeout = Math.min(this.#timeout, patience)
    const text = statement ?? this.#text(columns, call)
    for (let tries = 1; ; tries++) {
      const prepares = this.#prepares
      const send = (db) => (prepares ? db.query({ name: nameOf(text), text, values }) : db.query(text, values))
      let result
      try {
        result = await (timeout === Infinity ? send(this.#db) : this.#sendInTime(send, timeout, unended))
      } catch (error) {
        if (prepares && isUnprepared(error)) { // nothing happened: a pooler gave the connection of the server to others
          this.#prepares = false
          tries--
          continue
        }
        const isLost = isUnknown(error) && !this.isClosed // whatever became of a call, a closed pool can do nothing about it
        if (isLost) unended.push(Promise.resolve())
        if (!this.#retry || tries === MAX_TRIES || !(isTransient(error) || (once && isLost))) throw withHint(translate(error), call)
        await sleep(Math.random() * MAX_BACKOFF * tries) // so that calls that collided do not meet again
        continue
      }
      return decode(only(result))
    }
  }

  #text(columns, call) { return `select ${columns} from ${this.#schema}${call}` }

  /**
   * Whether the server is seen to go on with a call that is as old, in ms, or with another of the same text. The text is looked for up to
   * its arguments, which some drivers write into it.
   */
  async goesOn({ columns, call }, age) {
    try {
      return await this.row({
        statement: `select pg_catalog.count(*) > 0 as found from pg_catalog.pg_stat_activity
          where state = 'active' and datname = pg_catalog.current_database() and pg_catalog.starts_with(query, $1::text)
            and query_start <= pg_catalog.clock_timestamp() - $2::text::interval`,
        values: [this.#text(columns, call).split('$')[0], `${Math.round(age)} ms`],
        decode: (row) => flag(row, 'found'),
      })
    } catch {
      return false
    }
  }

  /** Calls a procedure, which commits by itself. */
  async call(procedure, values) {
    try {
      await this.#db.query(`call ${this.#schema}${procedure}`, values)
    } catch (error) {
      throw withHint(translate(error), procedure)
    }
  }

  #sendInTime(send, timeout, unended) {
    const { ended, destroy } = this.#isPool ? sendOnConnection(this.#db, send) : { ended: send(this.#db) }
    return new Promise((resolve, reject) => {
      const clear = timer(timeout, () => {
        reject(new TimedOut('no answer in time', { detail: `The call took longer than ${timeout} ms. Its tokens may be taken.` }))
        unended.push(ended)
        destroy?.()
      })
      ended.then(resolve, reject).finally(clear)
    })
  }
}

/** The row of a result. */
function only(result) {
  if (Array.isArray(result?.rows) && result.rows.length === 1 && result.rows[0]) return result.rows[0]
  throw new TypeError('pgratelimit: the query of the handle did not resolve to { rows } with one row: README.md has adapters')
}

const names = new Map()

/** A name that no other text has: behind a pooler, another program may have prepared a statement of the name on the same connection. */
function nameOf(text) {
  if (!names.has(text)) names.set(text, `ratelimit_${createHash('sha1').update(text).digest('hex')}`)
  return names.get(text)
}

/** Whether the connection of the server does not know a prepared statement that the driver knows, or the other way round. */
const isUnprepared = ({ code }) => code === '26000' || code === '42P05'

/** The error of a call, with the remedy where the server's hint is missing, or would mislead. */
function withHint(error, call) {
  if (error.code === '42883') { // undefined_function
    error.hint = 'Install pgratelimit in this database, put its schema on search_path, or name it with the option schema.'
  } else if (error.code === '42501' && error.message.includes(/^\w+/.exec(call))) { // insufficient_privilege
    error.hint = `Its owner can run: grant execute on function ${call.replace(/\$\d+::(\S+::)?|\(.*=>.*\)/g, '')} to <role>;`
  }
  return error
}

/** Sends a statement on a connection that can be destroyed, which pool.query() does not show. */
function sendOnConnection(pool, query) {
  let client, isDestroyed = false
  const ignore = () => {} // the query has the error, too
  const release = (destroy) => {
    client?.off('error', ignore)
    client?.release(destroy)
    client = undefined
  }
  // A promise of the client would come too late for an error that follows its connection in one packet, and so has no listener.
  const connected = new Promise((resolve, reject) => pool.connect((error, connection) => {
    client = connection?.on('error', ignore)
    return error ? reject(error) : resolve()
  }))
  const send = async () => {
    await connected
    if (isDestroyed) return release(false) // nothing was sent
    try {
      const result = await query(client)
      release(false)
      return result
    } catch (error) {
      release(isUnknown(error))
      throw error
    }
  }
  return {
    ended: send(),
    destroy() {
      isDestroyed = true
      if (client?.secretKey) cancel(pool, client)
      release(true)
    },
  }
}

/** Asks the server to end the statement of a connection. It would go on waiting for a lock, when the connection is gone. */
function cancel(pool, { processID, secretKey }) {
  const canceller = new pool.Client(pool.options)
  canceller.connection.on('error', () => {}) // then it goes on
  canceller.cancel({ activeQuery: null, processID, secretKey }, null) // null: whatever it does
  canceller.connection.stream.unref()
}

/** The outcome of a promise, or the reason of a signal that is aborted before: then `leave` is called, if there is one. */
export function unless(signal, promise, leave) {
  if (!signal) return promise
  return new Promise((resolve, reject) => {
    const takeBack = onAbort(signal, () => {
      leave?.()
      reject(signal.reason)
    })
    promise.then(resolve, reject).finally(takeBack)
  })
}
