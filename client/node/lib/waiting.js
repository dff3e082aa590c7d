import { invalid, kindOf } from './errors.js'

const A_DAY = 86_400_000 // ms

/** Calls fire after so many ms, and returns a function that prevents it. It is cut into days: a timer of Node beyond 24.8 fires at once. */
export function timer(ms, fire, { keepsAlive = true } = {}) {
  let id
  const set = (left) => {
    const piece = Math.min(Math.ceil(left), A_DAY)
    id = setTimeout(() => left > piece ? set(left - piece) : fire(), piece)
    if (!keepsAlive) id.unref()
  }
  set(ms)
  return () => clearTimeout(id)
}

/** A duration that the program passes in ms, if it is one. */
export function duration(name, ms, { least = Number.MIN_VALUE, most = Infinity, remedy = 'above 0; Infinity is no bound' } = {}) {
  if (typeof ms === 'number' && ms >= least && ms <= most) return ms
  throw invalid(name, `is ${typeof ms === 'number' ? ms : kindOf(ms)}.`, `Pass a number of milliseconds, ${remedy}.`)
}

const shared = new WeakMap() // by signal: the calls of its listener

/** Makes a call when a signal is aborted, and returns a function that takes it back. All calls share a listener: a signal warns of an eleventh. */
export function onAbort(signal, call) {
  let calls = shared.get(signal)
  if (!calls) {
    shared.set(signal, calls = new Set())
    calls.listener = () => {
      shared.delete(signal)
      for (const call of calls) call()
      calls.clear()
    }
    signal.addEventListener('abort', calls.listener, { once: true })
  }
  calls.add(call)
  return () => {
    if (!calls.delete(call) || calls.size > 0) return
    signal.removeEventListener('abort', calls.listener)
    shared.delete(signal)
  }
}
