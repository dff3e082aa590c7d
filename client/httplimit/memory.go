package httplimit

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

// A Memory is a limiter for [Local]: buckets in the memory of this process. It is safe for concurrent use.
//
// It is there for as long as the database does not answer, and knows less: each process has buckets of its own, which begin full;
// it has no overrides; and it takes no notice of an idempotency key, so a request that is sent again is charged again.
//
// It holds the buckets that were asked for last, at least 50,000 and at most twice as many. A bucket that was
// forgotten is full.
type Memory struct {
	policies map[string]client.Policy
	started  time.Time // whose monotonic clock counts

	mu    sync.Mutex
	young *model.Model // the buckets asked for since old was young
	old   *model.Model
}

const generation = 50_000

var _ client.Acquirer = (*Memory)(nil)

// NewMemory returns a Memory with these policies, which need Name, Capacity, Refill and Every. With n processes, each
// of n limiters grants as much as the policies allow: divide Capacity and Refill by n for the same sum. Panics
// if a policy lacks a number, has a number that the database would refuse, or is a quota or has a Lease: a Memory has no
// calendar and no slots.
func NewMemory(policies ...client.Policy) *Memory {
	m := &Memory{policies: make(map[string]client.Policy, len(policies)), started: time.Now()}
	for _, p := range policies {
		if p.Period != (client.Period{}) {
			panic(fmt.Sprintf("httplimit: NewMemory: policy %q is a quota: pass a Refill and Every in place of its Period", p.Name))
		}
		if p.Lease != 0 {
			panic(fmt.Sprintf("httplimit: NewMemory: policy %q has slots", p.Name))
		}
		m.policies[p.Name] = p
	}
	m.young, m.old = m.newGeneration(), m.newGeneration()
	return m
}

// newGeneration returns a model with the policies and without buckets. It panics if the database would refuse a policy.
func (m *Memory) newGeneration() *model.Model {
	buckets := model.New()
	for _, p := range m.policies {
		capacity, refill, every := max(0, p.Capacity), max(0, p.Refill), model.Micros(p.Every.Microseconds())
		if p.Refill == client.Zero {
			every = max(1, every) // which does not count
		}
		stepped, shadow := p.Stepped == client.Yes, p.Shadow == client.Yes
		err := buckets.Define(p.Name, model.Definition{
			Numbers: model.Numbers{Capacity: &capacity, Refill: &refill, Every: &every}, Stepped: &stepped, Shadow: &shadow,
		})
		if err != nil || p.Name == "" || !isNumber(p.Capacity) || !isNumber(p.Refill) || p.Every < 0 || p.Every%time.Microsecond != 0 {
			panic(fmt.Sprintf("httplimit: NewMemory: policy %q lacks a number, or has one out of range", p.Name))
		}
	}
	return buckets
}

// isNumber reports whether the field of a policy is set, and in range.
func isNumber(field int64) bool {
	return field == client.Zero || 0 < field && field <= 9_000_000_000_000
}

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
			return client.JointDecision{}, fmt.Errorf(
				"httplimit: memory: %w: Cost is no option of AcquireAll, which takes IdempotencyKey", client.ErrInvalidArgument)
		}
	}
	if len(charges) == 0 {
		return client.JointDecision{}, fmt.Errorf("httplimit: %w: no charges", client.ErrInvalidArgument)
	}
	request := make([]model.Charge, len(charges))
	for i, c := range charges {
		switch _, ok := m.policies[c.Policy]; {
		case !ok:
			return client.JointDecision{}, fmt.Errorf("httplimit: memory: %w: %q", client.ErrUnknownPolicy, c.Policy)
		case !fits(c.Key):
			return client.JointDecision{}, fmt.Errorf("httplimit: memory: %w: a key is no text of 1 to 512 bytes", client.ErrInvalidArgument)
		case c.Cost.Tokens() < 0:
			return client.JointDecision{}, fmt.Errorf("httplimit: memory: %w: a negative cost", client.ErrInvalidArgument)
		}
		// The key may be a part of something large.
		request[i] = model.Charge{BucketID: model.BucketID{Policy: c.Policy, Key: strings.Clone(c.Key)}, Cost: c.Cost.Tokens()}
	}

	m.mu.Lock()
	defer m.mu.Unlock()
	if m.young.Size() >= generation {
		m.old, m.young = m.young, m.newGeneration()
	}
	for _, c := range request {
		m.young.TakeOver(m.old, c.BucketID)
	}
	now := time.UnixMicro(time.Since(m.started).Microseconds())
	whole, err := m.young.AcquireAll(now, request, "")
	if err != nil {
		return client.JointDecision{}, fmt.Errorf("httplimit: memory: %w", err)
	}
	d := client.JointDecision{Decision: decisionOf(whole.Decision), Binding: whole.Binding - 1}
	for _, of := range whole.Decisions {
		d.Decisions = append(d.Decisions, decisionOf(of))
	}
	return d, nil
}

func decisionOf(d model.Decision) client.Decision {
	return client.Decision{
		Allowed: d.Allowed, Remaining: d.Remaining, RetryAfter: d.RetryAfter.Duration(), ResetAfter: d.ResetAfter.Duration(),
		Capacity: d.Capacity, Shadowed: d.Shadowed,
	}
}
