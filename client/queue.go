package client

import "slices"

const (
	// maxBatch bounds the requests of one call, and so the locks it holds and how long its callers wait.
	maxBatch = 256

	// minShare is where a call costs the server about a quarter of what its requests do.
	minShare = 32
)

// A queue decides which requests share a call, and when a call is made. It is a state machine without SQL,
// goroutines, clock or lock: its owner serialises the methods, and makes the calls.
//
// A request waits until take puts it into a batch, which is open until finish. Before it takes a batch, the
// owner has a slot reserved, and may let more requests arrive meanwhile.
//
// Invariants, between any two methods:
//
//  1. At most limit slots are in use: one for each open batch, and one that is reserved.
//  2. A bucket belongs to at most one open batch.
//  3. While a slot is free and none is reserved, each waiting request is for a bucket of an open batch. So a
//     call that stalls holds up its own buckets only.
//  4. Requests for one bucket are taken in the order of their arrival, those with an idempotency key and
//     those without.
//  5. A batch has at most maxBatch requests. Either all of them have an idempotency key or none has.
//
// The owner keeps a sixth: after a method has reserved a slot, it calls take.
type queue struct {
	limit    int
	waiting  line
	open     []*batch
	owners   map[bucket]*batch // the open batch of a bucket
	reserved bool
	shared   bool // whether the last batch from take had several requests
}

// A waiter is a request that others send.
type waiter struct {
	request
	batch *batch // nil while it waits
	gone  bool   // its caller has left

	next, prev *waiter // in line

	done   chan struct{} // gets one value when the answer is there
	answer Decision
	err    error
}

// A batch is the requests of one call.
type batch struct {
	waiters []*waiter
	buckets []bucket // each once
	callers int      // who have not left
	cancel  func()   // ends the call

	arguments // of the call, kept for the next
}

// arguments are those of ratelimit_acquire_many.
type arguments struct {
	policies, keys, idempotencyKeys []string
	costs                           []int64
}

func newQueue(limit int) *queue {
	return &queue{limit: limit, owners: make(map[bucket]*batch)}
}

// claim opens a batch for a caller who makes a call of its own, or returns nil: when there is no slot, when
// the bucket is in another call, or after a shared call, since others are about to ask too.
func (q *queue) claim(r request) *batch {
	if q.shared || !q.isFree() || q.owners[r.bucket()] != nil {
		return nil
	}
	b := new(batch)
	q.own(b, r.bucket())
	q.open = append(q.open, b)
	return b
}

// add lets a request wait, and reports whether it has reserved a slot for it.
func (q *queue) add(w *waiter) (reserved bool) {
	q.waiting.push(w)
	if q.isFree() && q.owners[w.bucket()] == nil {
		q.reserved = true
		return true
	}
	return false
}

// take fills b from the head of the queue and opens it in the reserved slot. If there is nothing to take it
// gives back the slot and returns false. Then another slot may be reserved: see reserve.
func (q *queue) take(b *batch) bool {
	q.reserved = false
	*b = batch{waiters: b.waiters[:0], buckets: b.buckets[:0], arguments: b.arguments}
	share := q.share()
	var next *waiter
	for w := q.waiting.first; w != nil && len(b.waiters) < maxBatch; w = next {
		next = w.next
		owner := q.owners[w.bucket()]
		switch {
		case len(b.waiters) > 0 && w.keyed() != b.waiters[0].keyed(): // they cost more, and may be sent again
			continue
		case owner == nil && len(b.waiters) < share:
			q.own(b, w.bucket())
		case owner == b: // it could go with nobody else
		default:
			continue
		}
		q.waiting.remove(w)
		w.batch = b
		b.waiters = append(b.waiters, w)
	}
	if len(b.waiters) == 0 {
		return false
	}
	b.callers = len(b.waiters)
	q.shared = len(b.waiters) > 1
	q.open = append(q.open, b)
	return true
}

// finish closes a batch whose call has ended, and reports whether it has reserved a slot.
func (q *queue) finish(b *batch) (reserved bool) {
	for _, at := range b.buckets {
		delete(q.owners, at)
	}
	q.open = slices.DeleteFunc(q.open, func(o *batch) bool { return o == b })
	return q.reserve()
}

// reserve reserves a slot if there is one and a waiting request can be taken.
func (q *queue) reserve() bool {
	if !q.isFree() {
		return false
	}
	for w := q.waiting.first; w != nil; w = w.next {
		if q.owners[w.bucket()] == nil {
			q.reserved = true
			return true
		}
	}
	return false
}

// leave is for a caller who waits no longer. It returns the batch that nobody waits for any more, if any.
func (q *queue) leave(w *waiter) (abandoned *batch) {
	if w.batch == nil {
		q.waiting.remove(w)
		return nil
	}
	w.gone = true
	if w.batch.callers--; w.batch.callers > 0 {
		return nil
	}
	return w.batch
}

// isFree reports whether a slot can be reserved or claimed. One is reserved at a time: whoever arrives
// meanwhile may travel in it.
func (q *queue) isFree() bool { return !q.reserved && len(q.open) < q.limit }

// share is how many requests a batch should have: an equal part of all there are for each slot, but not so
// few that the cost of the call outweighs theirs.
func (q *queue) share() int {
	all := q.waiting.length
	for _, b := range q.open {
		all += len(b.waiters)
	}
	return max((all+q.limit-1)/q.limit, minShare)
}

func (q *queue) own(b *batch, at bucket) {
	q.owners[at] = b
	b.buckets = append(b.buckets, at)
}

// A line is the waiting requests in order of arrival. Its links are in the requests: container/list would
// allocate for each.
type line struct {
	first, last *waiter
	length      int
}

func (l *line) push(w *waiter) {
	w.prev = l.last
	if l.last == nil {
		l.first = w
	} else {
		l.last.next = w
	}
	l.last = w
	l.length++
}

func (l *line) remove(w *waiter) {
	if w.prev == nil {
		l.first = w.next
	} else {
		w.prev.next = w.next
	}
	if w.next == nil {
		l.last = w.prev
	} else {
		w.next.prev = w.prev
	}
	w.next, w.prev = nil, nil
	l.length--
}
