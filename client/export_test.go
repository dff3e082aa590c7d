package client

var Backoff = backoff

// Forget empties the cache of denials.
func Forget(l *Limiter) { l.denialCache.forgetAll() }

// StopTimer makes a Hold find out by itself that its lease has ended.
func StopTimer(h *Hold) { h.timer.Stop() }
