package client

import (
	"slices"
	"time"
)

const (
	// maxBatch bounds the elements of one call, and so its locks and the wait of its callers. A batch below
	// the bound still takes a whole joint request.
	maxBatch = 256

	// minShare requests are enough for a call while another place is free. The fixed cost of a call of 8 is about half of its
	// cost. With more requests in it, 16 callers leave the other places idle.
	minShare = 8

	// spare adds 1/spare to the expected time of an answer. So requests that are let in are answered in time even if calls
	// take a little longer than the last ones.
	spare = 4
)

// A queue decides which requests share a call, when a call is made, and which requests are refused. It is a state machine
// without SQL, goroutines, clock or lock: its owner serialises the methods, makes the calls, and passes the time.
//
// A request waits until take puts it into a batch, which is open until finish. add, next, finish and hurry reserve a place
// for a batch. Requests that arrive between the reservation and take can join the batch. A caller whose request need not
// wait opens a batch with claim, and makes the call itself.
//
// Invariants, between any two methods:
//
//  1. At most limit places are in use: one for each open batch, and at most one reserved place.
//  2. A bucket belongs to at most one open batch. A joint request counts as a request for one virtual bucket, named
//     after all its buckets. If it owned each of its buckets, a stalled call on a bucket that all joint requests
//     charge would hold up all of them, and a joint request might wait forever until all its buckets are free.
//  3. While a place is free and none is reserved, each waiting request is for a bucket of an open batch, or lingers.
//     Requests linger only while a batch is open, from the step linger until the owner calls hurry. So a stalled
//     call holds up its own buckets only.
//  4. Requests for one bucket are taken in order of arrival. Requests with and without an idempotency key are two orders.
//  5. A batch that has maxBatch elements takes no more requests. Either all requests of a batch have an idempotency key
//     or none has, and either all are joint or none is.
//  6. At most maxWaiting requests wait, besides one that can be sent at once. Of the waiting requests, take refuses only
//     requests whose deadline comes before the quickest recent call would end. It never refuses the last waiting
//     request: a call for it measures the pace anew.
//
// The owner has two duties: after the step serve it calls take, and soon after linger it calls hurry.
type queue struct {
	limit      int
	maxWaiting int
	waiting    line
	elements   int // of the waiting requests
	pace       pace
	open       []*batch
	owners     map[bucket]*batch // the open batch of a bucket
	reserved   bool
	shared     bool // the last batch from take had several requests
}

// A step is the next duty of the owner.
type step int

const (
	nothing step = iota
	serve        // a place is reserved: call take
	linger       // too few requests for another call: wait for more, then call hurry
)

// A waiter is a request whose caller waits for the owner's call.
type waiter struct {
	request
	deadline time.Time // zero for none
	batch    *batch    // nil until take
	gone     bool      // the caller has left

	next, prev *waiter // in line

	done   chan struct{} // receives one value once answer or err is set
	answer JointDecision // a plain request sets only its Decision
	err    error
}

// elements is the size of the request in a call: 1, or the number of charges of a joint request.
func (w *waiter) elements() int { return max(1, len(w.charges)) }

// canShare reports whether both requests may be in one call. Requests with an idempotency key cost more, and only they may
// be sent again.
func (w *waiter) canShare(other *waiter) bool {
	return w.keyed() == other.keyed() && w.isJoint() == other.isJoint()
}

// A batch is the requests of one call. One that claim has opened has no waiters: the caller of its only request makes the call.
type batch struct {
	waiters   []*waiter
	late      []*waiter // refused by take: the owner sends them the error
	began     time.Time
	buckets   []bucket // each once
	callers   int      // that still wait
	abandoned bool     // all callers left before the answer
	cancel    func()   // ends the call
	packed    *packed  // buffers of the call, reused
}

func newQueue(limit, maxWaiting int) *queue {
	return &queue{limit: limit, maxWaiting: maxWaiting, pace: newPace(limit), owners: make(map[bucket]*batch)}
}

// claim opens a batch for a caller that makes its own call. It returns nil if no place is free, if the bucket
// is in an open batch, or if another call is not worth it. It also returns nil after a shared call, because
// other callers are about to ask too, and if a request that can be taken waits, because that one goes first.
func (q *queue) claim(r request, now time.Time) *batch {
	if q.shared || !q.hasPlace() || q.owners[r.bucket()] != nil || !q.isWorthIt(q.waiting.length+1) || q.canTake() {
		return nil
	}
	b := &batch{began: now}
	q.assign(b, r.bucket())
	q.open = append(q.open, b)
	return b
}

// refusal returns the error for a request that must not wait, or nil. A request that can be sent at once is
// never refused.
func (q *queue) refusal(w *waiter, now time.Time) *OverloadedError {
	if q.hasPlace() && q.owners[w.bucket()] == nil {
		return nil
	}
	late := time.Duration(0) // how long the answer takes, if that is longer than the deadline allows
	if !w.deadline.IsZero() {
		if expected := q.expected(w, now); now.Add(expected).After(w.deadline) {
			late = expected
		}
	}
	if q.waiting.length < q.maxWaiting && late == 0 {
		return nil
	}
	return &OverloadedError{Waiting: q.waiting.length, Expected: late}
}

// expected estimates the time until w is answered: the rest of the open call before it, then the calls for all waiting
// requests, each as long as the quickest recent call. The calls are counted at the size that take will give them, because a
// full call costs less for each request. It is 0 without recent calls.
func (q *queue) expected(w *waiter, now time.Time) time.Duration {
	owner := q.owners[w.bucket()]
	wait, atATime := time.Duration(0), q.limit
	switch {
	case owner != nil: // many requests may want this bucket: do not count on more open calls than now
		wait, atATime = q.pace.left(now.Sub(owner.began), now), len(q.open)
	case !q.reserved:
		wait = q.pace.left(now.Sub(q.open[0].began), now)
		for _, b := range q.open[1:] {
			wait = min(wait, q.pace.left(now.Sub(b.began), now))
		}
	}
	requests, elements := q.waiting.length+1, q.elements+w.elements()
	inCall := min(maxBatch, q.share(requests)*elements/requests)
	calls := min(requests, (elements+inCall-1)/inCall) // a request is never split
	wait += time.Duration((calls+atATime-1)/atATime) * q.pace.call(now)
	return wait + wait/spare
}

// add puts w in line, and reserves a place if w can be sent and a call is worth it.
func (q *queue) add(w *waiter) step {
	q.push(w)
	if q.hasPlace() && q.owners[w.bucket()] == nil {
		return q.reserveIfWorthIt()
	}
	return nothing
}

// take fills b from the head of the line and opens it in the reserved place. If no request can be taken, it frees the place
// and returns false. In either case it moves requests that cannot be answered in time to b.late. After true the owner calls
// next: another place may be free.
func (q *queue) take(b *batch, now time.Time) bool {
	q.reserved = false
	*b = batch{waiters: b.waiters[:0], late: b.late[:0], buckets: b.buckets[:0], packed: b.packed, began: now}
	q.refuseLate(b, now)
	share := q.share(q.waiting.length)
	elements := 0
	var next *waiter
	for w := q.waiting.first; w != nil && elements < maxBatch; w = next {
		next = w.next
		owner := q.owners[w.bucket()]
		switch {
		case len(b.waiters) > 0 && !w.canShare(b.waiters[0]):
			continue
		case owner == nil && len(b.waiters) < share:
			q.assign(b, w.bucket())
		case owner == b: // no other batch could take it, so share does not count
		default:
			continue
		}
		q.remove(w)
		w.batch = b
		b.waiters = append(b.waiters, w)
		elements += w.elements()
	}
	if len(b.waiters) == 0 {
		return false
	}
	b.callers = len(b.waiters)
	q.shared = len(b.waiters) > 1
	q.open = append(q.open, b)
	return true
}

// refuseLate moves to b.late, from the head of the line, the requests whose deadline comes before a call can end. It leaves
// the last waiting request.
func (q *queue) refuseLate(b *batch, now time.Time) {
	soonest := now.Add(q.pace.call(now))
	var next *waiter
	for w := q.waiting.first; w != nil && q.waiting.length > 1; w = next {
		next = w.next
		if !w.deadline.IsZero() && w.deadline.Before(soonest) {
			q.remove(w)
			b.late = append(b.late, w)
		}
	}
}

// finish closes a batch whose call has ended, and returns next.
func (q *queue) finish(b *batch, now time.Time) step {
	q.pace.observe(now.Sub(b.began), b.abandoned, now)
	for _, at := range b.buckets {
		delete(q.owners, at)
	}
	q.open = slices.DeleteFunc(q.open, func(o *batch) bool { return o == b })
	return q.next()
}

// next reserves a place if one is free, a waiting request can be taken, and a call is worth it.
func (q *queue) next() step {
	if !q.canTake() {
		return nothing
	}
	return q.reserveIfWorthIt()
}

// hurry is next without the test of worth, for requests that lingered long enough.
func (q *queue) hurry() step {
	if !q.canTake() {
		return nothing
	}
	q.reserved = true
	return serve
}

func (q *queue) reserveIfWorthIt() step {
	if !q.isWorthIt(q.waiting.length) {
		return linger
	}
	q.reserved = true
	return serve
}

// canTake reports whether a place is free and take would find a request.
func (q *queue) canTake() bool {
	if !q.hasPlace() {
		return false
	}
	for w := q.waiting.first; w != nil; w = w.next {
		if q.owners[w.bucket()] == nil {
			return true
		}
	}
	return false
}

// isWorthIt reports whether to start another call for so many waiting requests now. Beside open calls, half a share is enough.
func (q *queue) isWorthIt(waiting int) bool {
	return len(q.open) == 0 || waiting >= q.share(waiting)/2
}

// leave takes back the request of a caller that stops waiting. If the last caller of a batch leaves, it returns the batch.
func (q *queue) leave(w *waiter) (abandoned *batch) {
	if w.batch == nil {
		q.remove(w)
		return nil
	}
	w.gone = true
	if w.batch.callers--; w.batch.callers > 0 {
		return nil
	}
	w.batch.abandoned = true
	return w.batch
}

// hasPlace reports whether a place can be reserved or claimed. While a place is reserved, no other can be: requests that
// arrive until take can join its batch.
func (q *queue) hasPlace() bool { return !q.reserved && len(q.open) < q.limit }

// share is how many requests a batch should have: the waiting and the open requests, divided by the places, but no fewer than
// minShare if there are as many.
func (q *queue) share(waiting int) int {
	all := waiting
	for _, b := range q.open {
		all += max(1, len(b.waiters)) // a claimed batch has one request and no waiter
	}
	return max((all+q.limit-1)/q.limit, min(all, minShare))
}

func (q *queue) push(w *waiter) {
	q.waiting.push(w)
	q.elements += w.elements()
}

func (q *queue) remove(w *waiter) {
	q.waiting.remove(w)
	q.elements -= w.elements()
}

// assign makes a bucket belong to an open batch.
func (q *queue) assign(b *batch, at bucket) {
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

const (
	// paceCalls is the least number of calls to judge by: the first calls also connect.
	paceCalls = 5

	// paceLife is how long a pace is true after a call has ended.
	paceLife = 5 * time.Second
)

// A pace is how long the last calls took. A Combiner refuses requests that cannot be answered in time at this pace. The quickest of
// the calls counts, so that calls that stall, alone or together, make it refuse no request.
type pace struct {
	last []time.Duration // the newest replaces the oldest
	n    int
	at   time.Time // of the newest
}

// newPace is for a queue with so many calls at a time, which may all stall at once.
func newPace(limit int) pace {
	return pace{last: make([]time.Duration, max(paceCalls, 2*limit+1))}
}

// observe records how long a call took that ends now. An abandoned call is expected to have lasted as long again.
func (p *pace) observe(took time.Duration, abandoned bool, now time.Time) {
	if abandoned {
		took *= 2
	}
	p.last[p.n%len(p.last)] = took
	p.n++
	p.at = now
}

// call is how long a call takes at least, or 0 if nothing is known.
func (p *pace) call(now time.Time) time.Duration {
	if p.n < paceCalls || now.Sub(p.at) > paceLife {
		return 0
	}
	return slices.Min(p.last[:min(p.n, len(p.last))])
}

// left is how much longer a call will take that began so long ago. A call that lasts twice as long as usual has stalled: it is
// expected to last as long again as it has. If the usual time is unknown, left is 0.
func (p *pace) left(lasted time.Duration, now time.Time) time.Duration {
	usual := p.call(now)
	if lasted < 2*usual {
		return max(0, usual-lasted)
	}
	if usual == 0 {
		return 0
	}
	return lasted
}
