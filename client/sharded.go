package client

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// checkTimeout is how long a database has to return its shard number.
const checkTimeout = 5 * time.Second

// A Sharded is a limiter that spreads its keys over several databases, each with the package: its shards. [ShardOf] returns
// the shard of a key. A call about that key is one call there, with the answers of a [Combiner] on that database. Each
// shard has a Combiner, or with a [Prefetch] a [Prefetcher], and a pool of its own. So a shard that fails, or falls silent, holds up only
// the callers of that shard.
//
// It has the methods of a Combiner, but for WithTx: a caller's transaction is in some database, and a key's bucket in another.
// They return the errors of those methods. An error of a shard is a [*ShardError]. No other shard steps in: a bucket that is
// elsewhere would be full. A call to all shards joins the errors of those that failed. An error that all shards return alike is
// returned once, as by one database.
//
// Close it when it is no longer used.
type Sharded struct{ shards []*shard }

// A shard has some of the keys.
type shard struct {
	*Prefetcher // without a Prefetch it is a Combiner
	number, of  int
	known       atomic.Bool // whether its database has returned this shard number
	open        context.Context
	shut        context.CancelFunc

	mu       sync.Mutex
	checking *checking // nil until the database is asked, and after it has failed to answer
}

// A checking is a call that asks a database which shard it is, for all callers that wait for the answer.
type checking struct {
	done chan struct{}
	err  error
}

func newShard(prefetcher *Prefetcher, number, of int) *shard {
	s := &shard{Prefetcher: prefetcher, number: number, of: of}
	s.open, s.shut = context.WithCancel(context.Background())
	return s
}

// NewSharded returns a Sharded on the databases of pools: shard 0, shard 1 and so on, a power of two of them. Each database
// must have got its shard number, by ratelimit_define_shard. The role needs EXECUTE on ratelimit_shard, and the rights that
// [NewCombiner] names, or with a [Prefetch] [NewPrefetcher]. Options are the options of NewPrefetcher, for each of the shards. Panics where
// NewPrefetcher does.
//
// It asks every database which shard it is, and fails if a database is another shard, or no shard, or returns an error. A database
// that cannot be reached within 5 seconds is asked before its first call, once for all callers that wait then. So a program can
// start beside a shard that is down. It fails if no database can be reached.
//
// Errors: [ErrWrongShard]; of each shard a [*ShardError].
func NewSharded[P Pool](ctx context.Context, pools []P, opts ...Option) (*Sharded, error) {
	of := len(pools)
	if of < 1 || of > maxShards || of&(of-1) != 0 {
		return nil, failed("open shards", fmt.Errorf("%w: %d databases are listed, and the number of shards is a power of two", ErrWrongShard, of))
	}
	s := &Sharded{make([]*shard, of)}
	for i, pool := range pools {
		s.shards[i] = newShard(NewPrefetcher(pool, opts...), i, of)
	}
	if err := s.check(ctx); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

// check makes sure that the databases that answer are the shards that they are listed as.
func (s *Sharded) check(ctx context.Context) error {
	checking, cancel := context.WithTimeout(ctx, checkTimeout)
	defer cancel()
	errs := s.onAll(checking, func(*shard) error { return nil })
	refusals := slices.DeleteFunc(slices.Clone(errs), func(err error) bool { return err == nil || isSilence(err) })
	switch {
	case len(refusals) > 0:
		return errors.Join(refusals...)
	case ctx.Err() != nil:
		return failed("open shards", ctx.Err())
	case !slices.Contains(errs, nil):
		return errors.Join(errs...)
	}
	return nil
}

// check makes sure, once, that the database is this shard. It is asked once at a time, however many callers wait.
func (s *shard) check(ctx context.Context) error {
	if s.known.Load() {
		return nil
	}
	c := s.askWhich()
	if c == nil {
		return failed(verbCheck, ErrClosed)
	}
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return failed(verbCheck, ctx.Err())
	}
}

// askWhich asks the database which shard it is, unless a call already does, or it is known; after Close it returns nil. No
// caller's ctx ends the call: other callers wait for it, too.
func (s *shard) askWhich() *checking {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.open.Err() != nil:
		return nil
	case s.checking != nil:
		return s.checking
	}
	c := &checking{done: make(chan struct{})}
	s.checking = c
	go func() {
		defer close(c.done)
		ctx, cancel := context.WithTimeout(s.open, checkTimeout)
		defer cancel()
		c.err = s.checkShard(ctx, s.number, s.of)
		if c.err == nil {
			s.known.Store(true)
			return
		}
		if s.open.Err() != nil {
			c.err = failed(verbCheck, ErrClosed)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.checking = nil
	}()
	return c
}

// Close ends the call that asks which shard the database is, and then closes as [Prefetcher.Close] does.
func (s *shard) Close() {
	s.shut()
	s.mu.Lock()
	c := s.checking
	s.mu.Unlock()
	if c != nil {
		<-c.done
	}
	s.Prefetcher.Close()
}

func (s *shard) failed(err error) error {
	if err == nil {
		return nil
	}
	return &ShardError{s.number, s.of, err}
}

// ask makes a call on the shard of a key.
func ask[A any](ctx context.Context, s *Sharded, key string, call func(*shard) (A, error)) (answer A, err error) {
	shard := s.shards[ShardOf(key, len(s.shards))]
	if err = shard.check(ctx); err == nil {
		answer, err = call(shard)
	}
	return answer, shard.failed(err)
}

// tell is ask for calls that return nothing.
func (s *Sharded) tell(ctx context.Context, key string, call func(*shard) error) error {
	_, err := ask(ctx, s, key, func(shard *shard) (struct{}, error) { return struct{}{}, call(shard) })
	return err
}

// onAll makes a call on each shard, at the same time, and returns their errors, nil for a shard without error.
func (s *Sharded) onAll(ctx context.Context, call func(*shard) error) []error {
	errs := make([]error, len(s.shards))
	var calls sync.WaitGroup
	for i, shard := range s.shards {
		calls.Go(func() {
			err := shard.check(ctx)
			if err == nil {
				err = call(shard)
			}
			errs[i] = shard.failed(err)
		})
	}
	calls.Wait()
	return errs
}

// join makes one error of the errors of all shards. An error that all shards return alike is no shard's own, and returned once.
func join(errs []error) error {
	var first *ShardError
	if !errors.As(errs[0], &first) {
		return errors.Join(errs...)
	}
	for _, err := range errs[1:] {
		var e *ShardError
		if !errors.As(err, &e) || e.Err.Error() != first.Err.Error() {
			return errors.Join(errs...)
		}
	}
	return first.Err
}

// Close admits no more requests, and waits until all earlier requests are answered: see [Combiner.Close]. Prefetched tokens are given
// back: see [Prefetcher.Close].
func (s *Sharded) Close() {
	var closing sync.WaitGroup
	for _, shard := range s.shards {
		closing.Go(shard.Close)
	}
	closing.Wait()
}

// Acquire is [Combiner.Acquire] on the shard of key, or [Prefetcher.Acquire].
func (s *Sharded) Acquire(ctx context.Context, policy, key string, opts ...CallOption) (Decision, error) {
	return ask(ctx, s, key, func(on *shard) (Decision, error) { return on.Acquire(ctx, policy, key, opts...) })
}

// AcquireAll is [Combiner.AcquireAll] if all charges belong to one shard, and as exact. That is so when they have one key, under
// several policies. Charges of several shards are refused: no transaction spans two databases, so after a crash between them
// only a part of the tokens would be taken.
//
// Errors: [ErrSeveralShards], and those of Combiner.AcquireAll.
func (s *Sharded) AcquireAll(ctx context.Context, charges []Charge, opts ...CallOption) (JointDecision, error) {
	var key string // without charges, any shard returns the error
	if len(charges) > 0 {
		key = charges[0].Key
	}
	first := ShardOf(key, len(s.shards))
	for i, c := range charges {
		if this := ShardOf(c.Key, len(s.shards)); this != first {
			return JointDecision{}, failed(verbAcquireAll, fmt.Errorf("%w: charge 0 to shard %d and charge %d to shard %d of %d, and a request is one "+
				"transaction in one database. Give limits that are asked for together the same key, under different policies; "+
				"or ask for each alone, and refund when a later one is denied", ErrSeveralShards, first, i, this, len(s.shards)))
		}
	}
	return ask(ctx, s, key, func(on *shard) (JointDecision, error) { return on.AcquireAll(ctx, charges, opts...) })
}

// Peek is [Limiter.Peek] on the shard of key.
func (s *Sharded) Peek(ctx context.Context, policy, key string, opts ...CallOption) (Decision, error) {
	return ask(ctx, s, key, func(on *shard) (Decision, error) { return on.Peek(ctx, policy, key, opts...) })
}

// Refund is [Limiter.Refund] on the shard of key.
func (s *Sharded) Refund(ctx context.Context, policy, key string, amount int64) (Decision, error) {
	return ask(ctx, s, key, func(on *shard) (Decision, error) { return on.Refund(ctx, policy, key, amount) })
}

// Pause is [Limiter.Pause] on the shard of key.
func (s *Sharded) Pause(ctx context.Context, policy, key string, pauseFor time.Duration) (Decision, error) {
	return ask(ctx, s, key, func(on *shard) (Decision, error) { return on.Pause(ctx, policy, key, pauseFor) })
}

// Reset is [Limiter.Reset] on the shard of key.
func (s *Sharded) Reset(ctx context.Context, policy, key string) error {
	return s.tell(ctx, key, func(on *shard) error { return on.Reset(ctx, policy, key) })
}

// ResetAll is [Limiter.ResetAll] on all shards, at the same time.
func (s *Sharded) ResetAll(ctx context.Context, policy string) error {
	return join(s.onAll(ctx, func(on *shard) error { return on.ResetAll(ctx, policy) }))
}

// Charge is [Limiter.Charge] on the shard of key.
func (s *Sharded) Charge(ctx context.Context, policy, key string, cost int64, opts ...CallOption) (Decision, error) {
	return ask(ctx, s, key, func(on *shard) (Decision, error) { return on.Charge(ctx, policy, key, cost, opts...) })
}

// Settle is [Limiter.Settle] on the shard of key.
func (s *Sharded) Settle(ctx context.Context, policy, key, idempotencyKey string, cost int64) (Decision, error) {
	return ask(ctx, s, key, func(on *shard) (Decision, error) { return on.Settle(ctx, policy, key, idempotencyKey, cost) })
}

// Reserve is [Limiter.Reserve] on the shard of key.
func (s *Sharded) Reserve(ctx context.Context, policy, key string, maxWait time.Duration, opts ...CallOption) (Reservation, error) {
	return ask(ctx, s, key, func(on *shard) (Reservation, error) { return on.Reserve(ctx, policy, key, maxWait, opts...) })
}

// AcquireUpTo is [Limiter.AcquireUpTo] on the shard of key.
func (s *Sharded) AcquireUpTo(ctx context.Context, policy, key string, atMost int64, opts ...CallOption) (PartialDecision, error) {
	return ask(ctx, s, key, func(on *shard) (PartialDecision, error) { return on.AcquireUpTo(ctx, policy, key, atMost, opts...) })
}

// Wait is [Limiter.Wait] on the shard of key.
func (s *Sharded) Wait(ctx context.Context, policy, key string, opts ...CallOption) (Reservation, error) {
	return ask(ctx, s, key, func(on *shard) (Reservation, error) { return on.Wait(ctx, policy, key, opts...) })
}

// Hold is [Limiter.Hold] on the shard of key.
func (s *Sharded) Hold(ctx context.Context, policy, key string, opts ...CallOption) (h *Hold, d HoldDecision, err error) {
	err = s.tell(ctx, key, func(on *shard) (err error) {
		h, d, err = on.Hold(ctx, policy, key, opts...)
		return err
	})
	return h, d, err
}

// HoldWait is [Limiter.HoldWait] on the shard of key.
func (s *Sharded) HoldWait(ctx context.Context, policy, key string, opts ...CallOption) (h *Hold, d HoldDecision, err error) {
	err = s.tell(ctx, key, func(on *shard) (err error) {
		h, d, err = on.HoldWait(ctx, policy, key, opts...)
		return err
	})
	return h, d, err
}

// HoldAs is [Limiter.HoldAs] on the shard of key.
func (s *Sharded) HoldAs(ctx context.Context, policy, key, holder string, opts ...CallOption) (HoldDecision, error) {
	return ask(ctx, s, key, func(on *shard) (HoldDecision, error) { return on.HoldAs(ctx, policy, key, holder, opts...) })
}

// Renew is [Limiter.Renew] on the shard of key.
func (s *Sharded) Renew(ctx context.Context, policy, key, holder string) (heldFor time.Duration, err error) {
	return ask(ctx, s, key, func(on *shard) (time.Duration, error) { return on.Renew(ctx, policy, key, holder) })
}

// Release is [Limiter.Release] on the shard of key.
func (s *Sharded) Release(ctx context.Context, policy, key, holder string) (held bool, err error) {
	return ask(ctx, s, key, func(on *shard) (bool, error) { return on.Release(ctx, policy, key, holder) })
}

// Override is [Limiter.Override] on the shard of the override's key.
func (s *Sharded) Override(ctx context.Context, o Override) error {
	return s.tell(ctx, o.Key, func(on *shard) error { return on.Override(ctx, o) })
}

// RemoveOverride is [Limiter.RemoveOverride] on the shard of key.
func (s *Sharded) RemoveOverride(ctx context.Context, policy, key string) (removed bool, err error) {
	return ask(ctx, s, key, func(on *shard) (bool, error) { return on.RemoveOverride(ctx, policy, key) })
}

// Overrides lists the overrides of all shards as [Limiter.Overrides] lists the overrides of one database. With [OfKey], it asks one
// shard. A copy of a database has overrides of keys that belong to another shard: these are left out.
// If a shard fails, nothing is listed.
func (s *Sharded) Overrides(ctx context.Context, opts ...CallOption) ([]Override, error) {
	return listKeys(ctx, s, opts, newList("Overrides", opts), (*shard).Overrides, func(o Override) (policy, key string) { return o.Policy, o.Key })
}

// Holders lists the holders of all shards as [Limiter.Holders] lists the holders of one database. With [OfKey], it asks one
// shard. A copy of a database has holders of keys that belong to another shard: these are left out.
// If a shard fails, nothing is listed.
func (s *Sharded) Holders(ctx context.Context, opts ...CallOption) ([]Holder, error) {
	return listKeys(ctx, s, opts, newList("Holders", opts), (*shard).Holders, func(h Holder) (policy, key string) { return h.Policy, h.Key })
}

// listKeys merges the lists of all shards, by policy and key.
func listKeys[A any](ctx context.Context, s *Sharded, opts []CallOption, wanted settings,
	list func(*shard, context.Context, ...CallOption) ([]A, error), of func(A) (policy, key string),
) ([]A, error) {
	if key, ok := wanted.key.(string); ok {
		return ask(ctx, s, key, func(on *shard) ([]A, error) { return list(on, ctx, opts...) })
	}
	lists, err := listAll(ctx, s, func(on *shard) ([]A, error) { return listOwn(ctx, on, opts, wanted.maxRows, list, of) })
	if err != nil {
		return nil, err
	}
	all := slices.Concat(lists...)
	slices.SortStableFunc(all, func(a, b A) int {
		aPolicy, aKey := of(a)
		bPolicy, bKey := of(b)
		return cmp.Or(cmp.Compare(aPolicy, bPolicy), cmp.Compare(aKey, bKey))
	})
	return all[:min(len(all), int(wanted.maxRows))], nil
}

// listOwn lists what a shard has of its own keys. A copy of a larger database has rows of other shards' keys, too. If
// they fill a list, listOwn asks for a longer list.
func listOwn[A any](ctx context.Context, s *shard, opts []CallOption, wanted int32,
	list func(*shard, context.Context, ...CallOption) ([]A, error), of func(A) (policy, key string),
) ([]A, error) {
	for rows := wanted; ; rows = 2 * min(rows, math.MaxInt32/2) {
		all, err := list(s, ctx, append(slices.Clone(opts), MaxRows(rows))...)
		if err != nil {
			return nil, err
		}
		isAll := len(all) < int(rows)
		all = slices.DeleteFunc(all, func(row A) bool {
			_, key := of(row)
			return ShardOf(key, s.of) != s.number
		})
		if isAll || len(all) >= int(wanted) {
			return all, nil
		}
	}
}

// listAll asks all shards for lists.
func listAll[A any](ctx context.Context, s *Sharded, list func(*shard) (A, error)) ([]A, error) {
	lists := make([]A, len(s.shards))
	err := join(s.onAll(ctx, func(on *shard) (err error) {
		lists[on.number], err = list(on)
		return err
	}))
	return lists, err
}

// DefinePolicy is [Limiter.DefinePolicy] on all shards, at the same time. It is not one transaction: after an error the policy may
// be defined on some shards only. Repeat it until it succeeds.
func (s *Sharded) DefinePolicy(ctx context.Context, p Policy) error {
	return join(s.onAll(ctx, func(on *shard) error { return on.DefinePolicy(ctx, p) }))
}

// DropPolicy is [Limiter.DropPolicy] on all shards, at the same time. It is not one transaction: after an error some shards may
// have the policy still. Repeat it until it succeeds, or returns [ErrUnknownPolicy], which it returns only if no shard had the policy.
func (s *Sharded) DropPolicy(ctx context.Context, name string) error {
	errs := s.onAll(ctx, func(on *shard) error { return on.DropPolicy(ctx, name) })
	isUnknown := func(err error) bool { return errors.Is(err, ErrUnknownPolicy) }
	others := slices.DeleteFunc(slices.Clone(errs), isUnknown)
	if 0 < len(others) && len(others) < len(errs) { // some shards had it
		return errors.Join(others...)
	}
	return join(errs)
}

// Policies is [Limiter.Policies]: the policies that all shards have.
//
// Errors: a shard with other policies than shard 0, because a DefinePolicy or DropPolicy was not repeated until it succeeded.
func (s *Sharded) Policies(ctx context.Context) ([]Policy, error) {
	lists, err := listAll(ctx, s, func(on *shard) ([]Policy, error) { return on.Policies(ctx) })
	if err != nil {
		return nil, err
	}
	for i, list := range lists {
		if !slices.Equal(list, lists[0]) {
			return nil, s.shards[i].failed(failed("list policies", errors.New("its policies differ from those of shard 0: define or drop them again, on all shards")))
		}
	}
	return lists[0], nil
}

// Cleanup is [Limiter.Cleanup] on all shards, at the same time: a batch in each. It counts the rows that all shards have removed,
// also if some have failed.
func (s *Sharded) Cleanup(ctx context.Context, opts ...CallOption) (sum Cleaned, err error) {
	all, err := listAll(ctx, s, func(on *shard) (Cleaned, error) { return on.Cleanup(ctx, opts...) })
	for _, c := range all {
		sum.Buckets += c.Buckets
		sum.IdempotencyKeys += c.IdempotencyKeys
	}
	return sum, err
}

// RunCleanup is [Limiter.RunCleanup] on all shards, at the same time, each at its own pace. [OnError] gets a [*ShardError].
func (s *Sharded) RunCleanup(ctx context.Context, every time.Duration, opts ...CallOption) {
	report := runCleanup(every, opts) // here, where the caller can recover from a panic
	var running sync.WaitGroup
	for _, shard := range s.shards {
		running.Go(func() {
			shard.RunCleanup(ctx, every, OnError(func(err error) { report(shard.failed(err)) }))
		})
	}
	running.Wait()
}
