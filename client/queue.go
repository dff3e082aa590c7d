package client

import (
	"slices"
	"time"
)

const (
	// maxBatch bounds the elements of one call, and so the locks it holds and how long its callers wait. A
	// plain request is one, each charge of a joint request is one.
	maxBatch = 256

	// minShare is where a call costs the server about a quarter of what its requests do.
	minShare = 32

	// spare is the part of what the calls before a request are expected to take that is added to it: the requests let in are
	// to be answered in time, also when calls take a little longer than they did.
	spare = 4
)

// A queue decides which requests share a call, when a call is made, and which requests are refused. It is a state machine
// without SQL, goroutines, clock or lock: its owner serialises the methods, makes the calls, and says what time it is.
//
// A request waits until take puts it into a batch, which is open until finish. Before it takes a batch, the
// owner has a slot reserved, and may let more requests arrive meanwhile.
//
// Invariants, between any two methods:
//
//  1. At most limit slots are in use: one for each open batch, and one that is reserved.
//  2. A bucket belongs to at most one open batch. A joint request has one of its own making, which stands for
//     all that it names: were each of them owned, a bucket of everybody's would let a call that stalls hold up
//     everybody, and a request for several might wait for ever for all of them to be free.
//  3. While a slot is free and none is reserved, each waiting request is for a bucket of an open batch, or
//     is held for company: then a batch is open, and the owner was told to hold and has not called hurry
//     yet. So a call that stalls holds up its own buckets only.
//  4. Requests for one bucket are taken in the order of their arrival, those with an idempotency key and
//     those without.
//  5. A batch that has maxBatch elements takes no more. Either all of its requests have an idempotency key or
//     none has, and either all are joint or none is.
//  6. At most maxWaiting requests wait, besides one that is about to be sent. Of those that wait, only one whose deadline is
//     nearer than the shortest of the last calls took is refused, and never all of them: the last is sent, so that a pace that
//     is true no more is found out.
//
// The owner keeps two more: after a method has answered serve it calls take, and soon after hold it calls
// hurry.
type queue struct {
	limit      int
	maxWaiting int
	waiting    line
	elements   int // of the waiting requests
	pace       pace
	open       []*batch
	owners     map[bucket]*batch // the open batch of a bucket
	reserved   bool
	shared     bool // whether the last batch from take had several requests
}

// A step is what the owner has to do next.
type step int

const (
	nothing step = iota
	serve        // a slot is reserved: call take
	hold         // there are calls enough for so few requests: let others join them, and call hurry
)

// A waiter is a request that others send.
type waiter struct {
	request
	deadline time.Time // zero for none
	batch    *batch    // nil while it waits
	gone     bool      // the caller has left

	next, prev *waiter // in line

	done   chan struct{} // gets one value when the answer is there
	answer JointDecision // of a plain request the Decision alone
	err    error
}

// elements are what the request adds to a call.
func (w *waiter) elements() int { return max(1, len(w.charges)) }

// canShare reports whether both may be in one call. Those with an idempotency key cost more, and may be sent
// again.
func (w *waiter) canShare(other *waiter) bool {
	return w.keyed() == other.keyed() && w.isJoint() == other.isJoint()
}

// A batch is the requests of one call.
type batch struct {
	waiters []*waiter
	late    []*waiter // refused when the batch was taken: they are to be told
	began   time.Time
	buckets []bucket // each once
	callers int      // that have not left
	isLost  bool     // all callers have left, and there was no answer
	cancel  func()   // ends the call
	packed  *packed  // the call, kept for the next
}

func newQueue(limit, maxWaiting int) *queue {
	return &queue{limit: limit, maxWaiting: maxWaiting, pace: newPace(limit), owners: make(map[bucket]*batch)}
}

// claim opens a batch for a caller that makes a call of its own. It returns nil if no slot is free, if the
// bucket is in another call, if another call is not worth it, and after a shared call, since other callers
// are about to ask too.
func (q *queue) claim(r request, now time.Time) *batch {
	if q.shared || !q.isFree() || q.owners[r.bucket()] != nil || !q.isWorthIt(q.waiting.length+1) {
		return nil
	}
	b := &batch{began: now}
	q.own(b, r.bucket())
	q.open = append(q.open, b)
	return b
}

// refusal is why a request must not wait, or nil. One that can be sent at once is never refused.
func (q *queue) refusal(w *waiter, now time.Time) *OverloadedError {
	if q.isFree() && q.owners[w.bucket()] == nil {
		return nil
	}
	expected := time.Duration(0)
	if !w.deadline.IsZero() {
		expected = q.expected(w, now)
	}
	if q.waiting.length < q.maxWaiting && (expected == 0 || !now.Add(expected).After(w.deadline)) {
		return nil
	}
	return &OverloadedError{Waiting: q.waiting.length, Expected: expected}
}

// expected is how long an answer will take: the rest of the call that is before it, and then as many calls as the requests
// before it need, at the pace of the last calls. Those calls may be fuller than the last ones were, and fuller calls cost less
// for each request: so calls are counted as full as they will be. It is 0 if nothing is known.
func (q *queue) expected(w *waiter, now time.Time) time.Duration {
	owner := q.owners[w.bucket()]
	wait, atATime := time.Duration(0), q.limit
	switch {
	case owner != nil: // many may want this one bucket: then no more calls will be under way than are
		wait, atATime = q.pace.left(now.Sub(owner.began), now), len(q.open)
	case !q.reserved:
		wait = q.pace.left(now.Sub(q.open[0].began), now)
		for _, b := range q.open[1:] {
			wait = min(wait, q.pace.left(now.Sub(b.began), now))
		}
	}
	requests, elements := q.waiting.length+1, q.elements+w.elements()
	inCall := min(maxBatch, q.share(requests)*elements/requests)
	calls := min(requests, (elements+inCall-1)/inCall) // a request is not divided
	wait += time.Duration((calls+atATime-1)/atATime) * q.pace.call(now)
	return wait + wait/spare
}

// add lets a request wait.
func (q *queue) add(w *waiter) step {
	q.push(w)
	if q.isFree() && q.owners[w.bucket()] == nil {
		return q.reserveIf(q.isWorthIt(q.waiting.length))
	}
	return nothing
}

// take fills b from the head of the queue and opens it in the reserved slot. If there is nothing to take it
// gives back the slot and returns false. Another slot may be free then: see next. Requests that cannot be answered in time
// are moved to b.late, in either case.
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
			q.own(b, w.bucket())
		case owner == b: // it could go with nobody else
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

// refuseLate moves to b.late those whose time is over before a call can be, from the head of the queue on.
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

// finish closes a batch whose call has ended.
func (q *queue) finish(b *batch, now time.Time) step {
	q.pace.observe(now.Sub(b.began), b.isLost, now)
	for _, at := range b.buckets {
		delete(q.owners, at)
	}
	q.open = slices.DeleteFunc(q.open, func(o *batch) bool { return o == b })
	return q.next()
}

// next reserves a slot if one is free and a waiting request can be taken.
func (q *queue) next() step {
	if !q.canTake() {
		return nothing
	}
	return q.reserveIf(q.isWorthIt(q.waiting.length))
}

// hurry is next for requests that were held long enough.
func (q *queue) hurry() step {
	if !q.canTake() {
		return nothing
	}
	return q.reserveIf(true)
}

func (q *queue) reserveIf(worth bool) step {
	if !worth {
		return hold
	}
	q.reserved = true
	return serve
}

func (q *queue) canTake() bool {
	if !q.isFree() {
		return false
	}
	for w := q.waiting.first; w != nil; w = w.next {
		if q.owners[w.bucket()] == nil {
			return true
		}
	}
	return false
}

// isWorthIt reports whether to make another call at once: beside open ones only for half a share of requests.
// waiting is the number of waiting requests.
func (q *queue) isWorthIt(waiting int) bool {
	return len(q.open) == 0 || waiting >= q.share(waiting)/2
}

// leave takes back the request of a caller that waits no longer. If no caller waits for its batch any more,
// it returns the batch.
func (q *queue) leave(w *waiter) (abandoned *batch) {
	if w.batch == nil {
		q.remove(w)
		return nil
	}
	w.gone = true
	if w.batch.callers--; w.batch.callers > 0 {
		return nil
	}
	w.batch.isLost = true
	return w.batch
}

// isFree reports whether a slot can be reserved or claimed. One is reserved at a time: requests that arrive
// meanwhile may travel in it.
func (q *queue) isFree() bool { return !q.reserved && len(q.open) < q.limit }

// share is how many requests a batch should have: an equal part of all there are for each slot, but not so
// few that the cost of the call outweighs theirs.
func (q *queue) share(waiting int) int {
	all := waiting
	for _, b := range q.open {
		all += max(1, len(b.waiters)) // a caller's own call has no waiter
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
