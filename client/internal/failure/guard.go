// Package failure decides for middleware what becomes of requests without a decision: one table for HTTP and gRPC.
package failure

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/client"
)

const (
	// pause is how long an upgrade may have no functions.
	pause = 100 * time.Millisecond

	// maxNames bounds the policies that are counted apart, and the lines that are logged in a minute.
	maxNames = 1000

	// others are the policies beyond maxNames.
	others = "_other"
)

// A Guard remembers what a middleware has met. It is safe for concurrent use.
type Guard struct {
	hasDecided atomic.Bool
	hasChecked atomic.Bool

	mu     sync.Mutex
	passed map[string]int64     // requests without a decision, by policy
	logged map[string]time.Time // when a line was logged last
}

// NewGuard returns a Guard that has met nothing.
func NewGuard() *Guard {
	return &Guard{passed: make(map[string]int64), logged: make(map[string]time.Time)}
}

// Ask makes one call for all charges, and makes the answer about one charge joint: see Try.
func (g *Guard) Ask(
	ctx context.Context, timeout time.Duration, limiter client.Acquirer, charges []client.Charge, opts ...client.CallOption,
) (d client.JointDecision, err error) {
	err = g.Try(ctx, func() error {
		inTime, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		d, err = Ask(inTime, limiter, charges, opts...)
		if err != nil && inTime.Err() != nil && ctx.Err() == nil {
			err = fmt.Errorf("%w: no decision within the timeout of %v: raise it, or find what the call waits for: a lock, or a free connection", err, timeout)
		}
		return err
	})
	if err == nil {
		g.decided(ctx, limiter, charges, d.Decisions)
	}
	return d, err
}

// Ask is [Guard.Ask] without a guard, for a limiter that is asked instead.
func Ask(ctx context.Context, limiter client.Acquirer, charges []client.Charge, opts ...client.CallOption) (client.JointDecision, error) {
	if len(charges) == 1 {
		c := charges[0]
		d, err := limiter.Acquire(ctx, c.Policy, c.Key, append(opts, c.Cost)...)
		if err != nil {
			return client.JointDecision{}, err
		}
		return client.JointDecision{Decision: d, Decisions: []client.Decision{d}}, nil
	}
	d, err := limiter.AcquireAll(ctx, charges, opts...)
	if err == nil && len(d.Decisions) != len(charges) { // a foreign Acquirer
		return client.JointDecision{}, fmt.Errorf("%w: a limiter with %d decisions about %d charges",
			client.ErrInvalidArgument, len(d.Decisions), len(charges))
	}
	return d, err
}

// Try makes the call of a limiter, and once more after a pause if the package or a privilege is missing.
func (g *Guard) Try(ctx context.Context, call func() error) error {
	err := call()
	if client.KindOf(err) == client.Setup {
		select {
		case <-time.After(pause):
			err = call()
		case <-ctx.Done():
		}
	}
	if err == nil {
		g.hasDecided.Store(true)
	}
	return err
}

// checkTimeout is how long a check may take, which no request waits for.
const checkTimeout = 5 * time.Second

// decided looks at the decisions about the charges of a request, and logs what the program should know: a cost that no bucket can cover;
// and once, after the first decision, what further requests would lack, which the program's choice might hide.
func (g *Guard) decided(ctx context.Context, limiter client.Acquirer, charges []client.Charge, decisions []client.Decision) {
	for i, c := range charges {
		d, cost := decisions[i], c.Cost.Tokens()
		if !d.Allowed && d.Never() && 0 < d.Capacity && d.Capacity < cost && g.isDue("cost "+c.Policy) {
			const line = "rate limit: a request of more tokens than the capacity is never allowed"
			slog.WarnContext(ctx, line, "policy", c.Policy, "cost", cost, "capacity", d.Capacity)
		}
	}
	if g.hasChecked.Load() { // nearly always: a swap would take the line from the other cores
		return
	}
	checker, ok := limiter.(interface {
		Check(context.Context, client.Needs) error
	})
	if !ok || g.hasChecked.Swap(true) {
		return
	}
	go func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), checkTimeout)
		defer cancel()
		err := checker.Check(ctx, client.Needs{})
		if _, ok := errors.AsType[*client.NotReadyError](err); ok {
			slog.ErrorContext(ctx, err.Error())
		}
	}()
}

// Fails reports whether the request fails whatever the program has chosen.
func (g *Guard) Fails(err error) bool {
	kind := client.KindOf(err)
	return kind == client.Fault || kind == client.Setup && !g.hasDecided.Load()
}

// Report counts a request without a decision if it passes, and logs it: once a minute for each error and its policies.
func (g *Guard) Report(ctx context.Context, charges []client.Charge, err error, passes bool, attrs ...any) {
	kind, code := client.KindOf(err), ""
	if pgErr, ok := errors.AsType[*pgconn.PgError](err); ok {
		code = pgErr.Code
	}
	passed := g.count(charges, passes)
	if !g.isDue(fmt.Sprint(kind, code, slices.Sorted(maps.Keys(passed)))) {
		return
	}
	level := slog.LevelWarn
	if kind != client.Away {
		level = slog.LevelError
	}
	slog.Log(ctx, level, "rate limit not checked", append(attrs, "passes", passes, "passed", passed, "error", err)...)
}

// count returns how many requests of these policies have passed.
func (g *Guard) count(charges []client.Charge, passes bool) map[string]int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	counts := make(map[string]int64, len(charges))
	for _, c := range charges {
		name := c.Policy
		if _, isKnown := g.passed[name]; !isKnown && len(g.passed) >= maxNames {
			name = others
		}
		if _, isCounted := counts[name]; passes && !isCounted {
			g.passed[name]++
		}
		counts[name] = g.passed[name]
	}
	return counts
}

// isDue reports whether a line was not logged in the last minute, and remembers it.
func (g *Guard) isDue(line string) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	now := time.Now()
	isOld := func(_ string, last time.Time) bool { return now.Sub(last) >= time.Minute }
	if len(g.logged) >= maxNames {
		maps.DeleteFunc(g.logged, isOld)
	}
	last, isKnown := g.logged[line]
	if isKnown && !isOld("", last) || !isKnown && len(g.logged) >= maxNames {
		return false
	}
	g.logged[line] = now
	return true
}

// Passed returns how many requests have passed without a decision, by policy.
func (g *Guard) Passed() map[string]int64 {
	g.mu.Lock()
	defer g.mu.Unlock()
	return maps.Clone(g.passed)
}
