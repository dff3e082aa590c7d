package client

var Backoff = backoff

// QueueLength counts the requests that wait.
func QueueLength(c *Combiner) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.queue.waiting.length
}

// Denials counts what the cache holds.
func Denials(l *Limiter) (n int) {
	for i := range l.denials.shards {
		n += len(l.denials.shards[i].byKey)
	}
	return n
}

func Forget(l *Limiter) { l.denials.forgetAll() }
