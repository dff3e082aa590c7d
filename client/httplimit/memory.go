package httplimit

import (
	"context"
	"fmt"
	"math"
	"math/bits"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
)

// A Memory is a limiter for [Local]: buckets in the memory of this process. It is safe for concurrent use.
//
// It is there for as long as the database does not answer, and knows less: each process has buckets of its own,
// which begin full; refill is continuous, also where the policy is stepped; it has no overrides; and it takes no
// notice of an idempotency key, so a request that is sent again is charged again.
//
// It holds the buckets that were asked for last, at least 50,000 and at most twice as many. A bucket that was
// forgotten is full.
type Memory struct {
	policies map[string]client.Policy
	started  time.Time

	mu    sync.Mutex
	young map[bucket]level // buckets asked for since old was young
	old   map[bucket]level
}

type bucket struct{ policy, key string }

// A level is how many microtokens a bucket held, so many microseconds after the Memory was made.
type level struct{ held, at int64 }

const generation = 50_000

var _ client.Acquirer = (*Memory)(nil)

// NewMemory returns a Memory with these policies, which need Name, Capacity, Refill and Every. With n processes, each
// of n limiters grants as much as the policies allow: divide Capacity and Refill by n for the same sum. Panics
// if a policy lacks a number, has a number that the database would refuse, or is a quota or has a Lease: a Memory has no
// calendar and no slots.
func NewMemory(policies ...client.Policy) *Memory {
	m := &Memory{policies: make(map[string]client.Policy, len(policies)), started: time.Now(), young: make(map[bucket]level)}
	for _, p := range policies {
		if p.Period != (client.Period{}) {
			panic(fmt.Sprintf("httplimit: NewMemory: policy %q is a quota: pass a Refill and Every in place of its Period", p.Name))
		}
		if p.Lease != 0 {
			panic(fmt.Sprintf("httplimit: NewMemory: policy %q has slots", p.Name))
		}
		if p.Name == "" || p.Capacity < 1 && p.Capacity != client.Zero || p.Capacity > maxTokens || p.Refill > maxTokens ||
			p.Refill < 1 && p.Refill != client.Zero || p.Every < 0 || p.Every == 0 && p.Refill != client.Zero || p.Every%time.Microsecond != 0 {
			panic(fmt.Sprintf("httplimit: NewMemory: policy %q lacks a number, or has one out of range", p.Name))
		}
		p.Capacity = max(0, p.Capacity) // of client.Zero
		m.policies[p.Name] = p
	}
	return m
}

const (
	maxTokens   = 9_000_000_000_000
	microtokens = 1_000_000 // of a token
	never       = time.Duration(math.MaxInt64)
)

// Acquire is [client.Limiter.Acquire] on these buckets.
//
// Errors: [client.ErrUnknownPolicy], [client.ErrInvalidArgument].
func (m *Memory) Acquire(ctx context.Context, policy, key string, opts ...client.CallOption) (client.Decision, error) {
	charge := client.Charge{Policy: policy, Key: key}
	for _, opt := range opts {
		if cost, ok := opt.(client.CostOption); ok {
			charge.Cost = cost
		}
	}
	d, err := m.AcquireAll(ctx, []client.Charge{charge})
	return d.Decision, err
}

// AcquireAll is [client.Limiter.AcquireAll] on these buckets.
//
// Errors: as Acquire.
func (m *Memory) AcquireAll(_ context.Context, charges []client.Charge, opts ...client.CallOption) (client.JointDecision, error) {
	for _, opt := range opts {
		if _, ok := opt.(client.CostOption); ok {
			return client.JointDecision{}, fmt.Errorf("httplimit: memory: %w: Cost is no option of AcquireAll, which takes IdempotencyKey", client.ErrInvalidArgument)
		}
	}
	if len(charges) == 0 {
		return client.JointDecision{}, fmt.Errorf("httplimit: %w: no charges", client.ErrInvalidArgument)
	}
	sums := make(map[bucket]int64, len(charges))
	for _, c := range charges {
		switch _, ok := m.policies[c.Policy]; {
		case !ok:
			return client.JointDecision{}, fmt.Errorf("httplimit: memory: %w: %q", client.ErrUnknownPolicy, c.Policy)
		case !fits(c.Key):
			return client.JointDecision{}, fmt.Errorf("httplimit: memory: %w: a key is no text of 1 to 512 bytes", client.ErrInvalidArgument)
		case c.Cost.Tokens() < 0:
			return client.JointDecision{}, fmt.Errorf("httplimit: memory: %w: a negative cost", client.ErrInvalidArgument)
		}
		b := bucket{c.Policy, c.Key}
		sums[b] = min(sums[b], math.MaxInt64-c.Cost.Tokens()) + c.Cost.Tokens()
	}

	m.mu.Lock()
	defer m.mu.Unlock()
	now := time.Since(m.started).Microseconds()
	whole := client.JointDecision{Decisions: make([]client.Decision, len(charges))}
	whole.Allowed = true
	for i, c := range charges {
		p, b := m.policies[c.Policy], bucket{c.Policy, c.Key}
		d := &whole.Decisions[i]
		d.Capacity = p.Capacity
		d.RetryAfter = wait(p, m.look(b, now), now, sums[b])
		d.Allowed = d.RetryAfter == 0
		if !d.Allowed && p.Shadow == client.Yes {
			d.Allowed, d.Shadowed, d.RetryAfter = true, true, 0
		}
		whole.Allowed = whole.Allowed && d.Allowed
		whole.Shadowed = whole.Shadowed || d.Shadowed
	}
	for b, cost := range sums {
		p, l := m.policies[b.policy], m.look(b, now)
		if whole.Allowed && cost > 0 && wait(p, l, now, cost) == 0 {
			m.put(b, level{refilled(p, l, now) - cost*microtokens, now})
		}
	}
	for i, c := range charges {
		p, l := m.policies[c.Policy], m.look(bucket{c.Policy, c.Key}, now)
		d := &whole.Decisions[i]
		d.Remaining = refilled(p, l, now) / microtokens
		d.ResetAfter = wait(p, l, now, d.Capacity)
	}
	whole.Binding = m.binding(charges, sums, whole)
	d := whole.Decisions[whole.Binding]
	d.Allowed, d.Shadowed = whole.Allowed, whole.Allowed && whole.Shadowed
	whole.Decision = d
	return whole, nil
}

// look returns the last known level of a bucket.
func (m *Memory) look(b bucket, now int64) level {
	if l, ok := m.young[b]; ok {
		return l
	}
	if l, ok := m.old[b]; ok {
		m.put(b, l)
		return l
	}
	return level{m.policies[b.policy].Capacity * microtokens, now}
}

// put begins a generation when one is complete. It so forgets the buckets that no request has asked for since the
// generation before was complete.
func (m *Memory) put(b bucket, l level) {
	if len(m.young) >= generation {
		m.old, m.young = m.young, make(map[bucket]level)
	}
	m.young[bucket{b.policy, strings.Clone(b.key)}] = l // the key may be a part of something large
}

// refilled is how many microtokens a bucket holds by now.
func refilled(p client.Policy, l level, now int64) int64 {
	if p.Refill == client.Zero {
		return l.held
	}
	credit := mulDiv(now-l.at, p.Refill*microtokens, p.Every.Microseconds(), false)
	return l.held + min(p.Capacity*microtokens-l.held, credit)
}

// wait is how long until a bucket covers a cost.
func wait(p client.Policy, l level, now, cost int64) time.Duration {
	switch {
	case cost == 0:
		return 0
	case cost > p.Capacity:
		return never
	case cost*microtokens <= l.held:
		return 0
	case p.Refill == client.Zero:
		return never
	}
	end := mulDiv(cost*microtokens-l.held, p.Every.Microseconds(), p.Refill*microtokens, true)
	return time.Duration(min(max(0, end-(now-l.at)), never.Microseconds())) * time.Microsecond
}

// mulDiv is a * b / c, rounded up or down, and at most the largest number. None is negative.
func mulDiv(a, b, c int64, up bool) int64 {
	high, low := bits.Mul64(uint64(a), uint64(b))
	if high >= uint64(c) {
		return math.MaxInt64
	}
	quotient, rest := bits.Div64(high, low, uint64(c))
	if up && rest > 0 {
		quotient++
	}
	return int64(min(quotient, math.MaxInt64))
}

// binding is the charge that decides: see [client.JointDecision]. Policies that only watch come last, and charges of
// nothing before them.
func (m *Memory) binding(charges []client.Charge, sums map[bucket]int64, whole client.JointDecision) (binding int) {
	rank := func(i int) [3]int64 {
		c, d := charges[i], whole.Decisions[i]
		var r [3]int64
		if m.policies[c.Policy].Shadow == client.Yes {
			r[0] = 1
		}
		if c.Cost.Tokens() == 0 {
			r[1] = 1
		}
		if sum := sums[bucket{c.Policy, c.Key}]; !whole.Allowed {
			r[2] = -int64(d.RetryAfter)
		} else if sum > 0 {
			r[2] = d.Remaining / sum
		}
		return r
	}
	for i := range charges {
		this, first := rank(i), rank(binding)
		if slices.Compare(this[:], first[:]) < 0 {
			binding = i
		}
	}
	return binding
}
