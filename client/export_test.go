package client

var Backoff = backoff

// Denials counts what the cache holds.
func Denials(l *Limiter) (n int) {
	for i := range l.denials.shards {
		n += len(l.denials.shards[i].byKey)
	}
	return n
}

func Forget(l *Limiter) { l.denials.forgetAll() }
