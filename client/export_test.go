package client

var Backoff = backoff

// Denials counts what the cache holds.
func Forget(l *Limiter) { l.denials.forgetAll() }
