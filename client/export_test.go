package client

var Backoff = backoff

// Denials counts what the cache holds.
func Forget(l *Limiter) { l.denials.forgetAll() }

// StopTimer makes a Hold find out by itself that its lease has ended.
func StopTimer(h *Hold) { h.timer.Stop() }
