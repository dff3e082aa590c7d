package client_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

func TestCombiner_WhoeverArrivesDuringACallSharesTheNext(t *testing.T) {
	atGate(t, 1, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		one := ask(t.Context(), limiter, "k1")
		two := ask(t.Context(), limiter, "k2", client.Cost(20))
		three := ask(t.Context(), limiter, "k3")
		again := ask(t.Context(), limiter, "k2", client.Cost(0))

		call := db.only(t)
		require.False(t, call.batch)
		call.grant()
		require.EqualValues(t, 1, requireGranted(t, one).Remaining)

		call = db.only(t)
		five := ask(t.Context(), limiter, "k5")
		require.True(t, call.batch)
		require.Equal(t, []string{"p", "p", "p"}, call.policies)
		require.Equal(t, []string{"k2", "k3", "k2"}, call.keys, "in the order of arrival")
		require.Equal(t, []int64{20, 1, 0}, call.costs)
		require.Nil(t, call.once)
		require.Contains(t, call.sql, `"s".ratelimit_acquire_packed(`)
		require.Contains(t, call.sql, `synchronous_commit`)
		call.grant()
		require.EqualValues(t, 2, requireGranted(t, two).Remaining)
		require.EqualValues(t, 3, requireGranted(t, three).Remaining)
		require.EqualValues(t, 2, requireGranted(t, again).Remaining)

		call = db.only(t)
		require.False(t, call.batch, "a batch of one is a plain call")
		call.grant()
		require.EqualValues(t, 5, requireGranted(t, five).Remaining)
		require.Equal(t, 3, db.count())
	}, client.Schema("s"), client.NoFlush())
}

// Who asks first after a shared call waits for those about to ask; alone again, for nobody.
func TestCombiner_AfterASharedCallARequestQueues(t *testing.T) {
	atGate(t, 1, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		got := askKeys(t.Context(), limiter, 1, 3)
		db.next(t).grant()
		requireGranted(t, got...)

		type mark struct{}
		for _, own := range []bool{false, true} {
			synctest.Wait() // until nobody looks for more
			got := ask(context.WithValue(t.Context(), mark{}, true), limiter, "k4")
			call := db.only(t)
			require.Equal(t, own, call.ctx.Value(mark{}) != nil)
			call.grant()
			requireGranted(t, got)
		}
	})
}

// What the server would refuse, or what would fail or burden a call for others.
func TestCombiner_UnfitRequestsTravelAlone(t *testing.T) {
	behindK1(t, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		ctx, alone := t.Context(), 1
		for _, unfit := range []string{"\xff", strings.Repeat("k", 513)} {
			_ = ask(ctx, limiter, unfit)
			_ = ask(ctx, limiter, "k2", client.IdempotencyKey(unfit))
			_ = askAll(ctx, limiter, []string{"k1", unfit})
			alone += 3
			require.Len(t, db.underWay(), alone)
		}
		for _, charges := range [][]string{{}, make([]string, 1001)} {
			_ = askAll(ctx, limiter, charges)
			alone++
			require.Len(t, db.underWay(), alone)
		}
		require.ErrorIs(t, (<-askAll(ctx, limiter, []string{"k1", "\x00"})).err, client.ErrInvalidArgument)
		fit := ask(ctx, limiter, strings.Repeat("k", 512))
		_ = askAll(ctx, limiter, make([]string, 1000))
		require.Len(t, db.underWay(), alone)
		for _, call := range db.underWay() {
			require.False(t, call.batch)
			call.answer <- pgError("22023")
		}
		call := db.next(t)
		requireGranted(t, fit)
		require.Len(t, call.keys, 1000)
		call.grant()
	})
}

// However many requests a call has that waits for a lock: others do not wait for it.
func TestCombiner_AStalledCallLeavesTheWayToOthers(t *testing.T) {
	t.Parallel()
	for _, requests := range []int{1, 2, 31, 32, 50, 256} {
		synctest.Test(t, func(t *testing.T) {
			db, limiter := gated(t, client.CallsInFlight(2))
			askKeys(t.Context(), limiter, 1, 2)
			askKeys(t.Context(), limiter, 1000, requests)
			stalled := db.second(t)
			require.Equal(t, "k1000", stalled.keys[0])
			for len(db.beside(stalled)) > 0 {
				db.beside(stalled)[0].grant()
			}

			same := ask(t.Context(), limiter, "k1000")
			for n := range 5 {
				got := ask(t.Context(), limiter, fmt.Sprint("k", 2000+n))
				time.Sleep(5 * time.Millisecond) // for company, of which there is none
				require.Len(t, db.beside(stalled), 1, "beside a call of %d", len(stalled.keys))
				db.beside(stalled)[0].grant()
				requireGranted(t, got)
			}
			time.Sleep(time.Second)
			require.Empty(t, db.beside(stalled), "its own bucket waits")
			stalled.grant()
			db.only(t).grant()
			requireGranted(t, same)
		})
	}
}

// When a bucket is locked, each bucket of the call is asked for by itself: one of another policy is another, whatever its key.
// Requests of several charges stay together if they have all buckets in common.
func TestCombiner_ALockedCallIsSplitByBucket(t *testing.T) {
	t.Parallel()
	for verb, test := range map[string]struct {
		asks  [][2]string // policy and key; of a joint request two keys
		apart []string    // the calls, of which the first meets the lock, for the first request and the last
	}{
		"acquire":     {[][2]string{{"p", "k2"}, {"p", "k3"}, {"q", "k2"}, {"p", "k2"}}, []string{"[p p] [k2 k2]", "[p] [k3]", "[q] [k2]"}},
		"acquire all": {[][2]string{{"k9", "k2"}, {"k9", "k3"}, {"k9", "k2"}}, []string{"[p p p p] [k9 k2 k9 k2]", "[p p] [k9 k3]"}},
	} {
		t.Run(verb, func(t *testing.T) {
			behindK1(t, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
				var answers []<-chan answer
				for _, a := range test.asks {
					if verb == "acquire" {
						answers = append(answers, askOf(t.Context(), limiter, a[0], a[1]))
					} else {
						answers = append(answers, askAll(t.Context(), limiter, a[:]))
					}
				}
				db.next(t).answer <- pgError("55P03")
				var apart []string
				for _, call := range db.underWay() {
					apart = append(apart, fmt.Sprint(call.policies, call.keys))
					if apart[len(apart)-1] == test.apart[0] {
						call.answer <- pgError("55P03")
					} else {
						call.grant()
					}
				}
				require.ElementsMatch(t, test.apart, apart)
				last := len(answers) - 1
				requireGranted(t, answers[1:last]...)
				for _, got := range []answer{<-answers[0], <-answers[last]} {
					require.ErrorIs(t, got.err, client.ErrLocked)
					require.ErrorContains(t, got.err, "pgratelimit: "+verb+": ")
					require.Zero(t, got.JointDecision)
				}
			})
		})
	}
}

func TestCombiner_WhoLeavesASplitCallIsNotAskedFor(t *testing.T) {
	behindK1(t, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		const atATime = 8
		ctx, leave := context.WithCancel(t.Context())
		stay, gone := askKeys(t.Context(), limiter, 10, atATime+3), askKeys(ctx, limiter, 30, 3)
		db.only(t).grant()
		db.only(t).answer <- pgError("55P03")
		require.Len(t, db.underWay(), atATime)
		leave()
		for _, got := range gone {
			require.ErrorIs(t, (<-got).err, context.Canceled)
		}
		db.grantAll()
		requireGranted(t, stay...)
		require.Equal(t, 2+len(stay), db.count())
	})
}

// What a caller leaves behind is used by the next, so it must not be left twice.
func TestCombiner_WhoIsAnsweredDoesNotLeave(t *testing.T) {
	atGate(t, 1, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		answered := 0
		for range 100 {
			_ = ask(t.Context(), limiter, "k1")
			ctx, cancel := context.WithCancel(t.Context())
			two, three := ask(ctx, limiter, "k2"), ask(t.Context(), limiter, "k3")
			call := db.next(t)
			cancel()
			call.grant() // most often before its caller has come round to leaving
			requireGranted(t, three)
			if got := <-two; got.err == nil {
				answered++
			}
		}
		require.NotZero(t, answered)
	})
}

func TestCombiner_WhoLeavesDuringACallHarmsNobody(t *testing.T) {
	behindK1(t, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		ctx, cancel := context.WithCancel(t.Context())
		two, three := ask(ctx, limiter, "k2"), ask(t.Context(), limiter, "k3")
		call := db.next(t)
		require.Equal(t, []string{"k2", "k3"}, call.keys)
		cancel()
		require.EqualError(t, (<-two).err, "pgratelimit: acquire: context canceled")
		require.NoError(t, call.ctx.Err())
		four := ask(t.Context(), limiter, "k4") // may use what is left of two, but must not see its answer
		call.grant()
		require.EqualValues(t, 3, requireGranted(t, three).Remaining)
		db.only(t).grant()
		require.EqualValues(t, 4, requireGranted(t, four).Remaining)
	})
}

// Else a call that hangs would hold up its lane for ever.
func TestCombiner_ACallEndsWhenAllHaveLeft(t *testing.T) {
	atGate(t, 1, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		ctx, cancel := context.WithCancel(t.Context())
		alone := ask(ctx, limiter, "k1")
		waiting, stop := context.WithCancel(t.Context())
		leavers := askKeys(waiting, limiter, 2, 2)
		cancel()
		require.ErrorIs(t, (<-alone).err, context.Canceled)

		hung := db.only(t)
		require.Equal(t, []string{"k2", "k3"}, hung.keys)
		four := ask(t.Context(), limiter, "k4")
		stop()
		for _, left := range leavers {
			require.ErrorIs(t, (<-left).err, context.Canceled)
		}
		call := db.only(t)
		require.ErrorIs(t, hung.ctx.Err(), context.Canceled)
		require.Equal(t, []string{"k4"}, call.keys)
		call.grant()
		require.EqualValues(t, 4, requireGranted(t, four).Remaining)
	})
}

func TestCombiner_CloseWaitsAndRefuses(t *testing.T) {
	atGate(t, 1, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		one, two, three := ask(t.Context(), limiter, "k1"), ask(t.Context(), limiter, "k2"), ask(t.Context(), limiter, "k3")
		unreadable := ask(t.Context(), limiter, "\xff8")
		require.Len(t, db.underWay(), 2)

		closed := make(chan struct{}, 2)
		for range 2 {
			go func() { limiter.Close(); closed <- struct{}{} }()
		}
		synctest.Wait()
		require.Empty(t, closed)
		for _, key := range []string{"k1", "k4", "\xff"} {
			_, err := limiter.Acquire(t.Context(), "p", key)
			require.ErrorIs(t, err, client.ErrClosed)
			require.EqualError(t, err, "pgratelimit: acquire: limiter is closed")
		}

		db.underWay()[0].grant()
		require.EqualValues(t, 1, requireGranted(t, one).Remaining)
		call := db.underWay()[1]
		require.Equal(t, []string{"k2", "k3"}, call.keys, "those who waited are served")
		require.Empty(t, closed)
		call.deny(time.Hour)
		for _, got := range []<-chan answer{two, three} {
			require.False(t, (<-got).Allowed)
		}
		call = db.only(t)
		require.Empty(t, closed)
		call.grant()
		require.EqualValues(t, 8, requireGranted(t, unreadable).Remaining)
		<-closed
		<-closed
		require.ErrorIs(t, errOf(limiter.Acquire(t.Context(), "p", "k2")), client.ErrClosed, "whatever was remembered")
		limiter.Close()
	}, client.DenialCache())
}

// Text that only the database can tell from good text.
func TestCombiner_TextTheDatabaseCannotHoldFailsItsOwnerOnly(t *testing.T) {
	t.Parallel()
	for _, code := range []string{"22021", "22P05"} {
		synctest.Test(t, func(t *testing.T) {
			db, limiter := gated(t, client.CallsInFlight(1))
			_ = ask(t.Context(), limiter, "k1")
			two, three := ask(t.Context(), limiter, "k2"), ask(t.Context(), limiter, "k3")
			db.only(t).grant()
			db.only(t).answer <- pgError(code)
			db.only(t).answer <- pgError(code)
			db.only(t).grant()
			require.ErrorIs(t, (<-two).err, client.ErrInvalidArgument)
			require.EqualValues(t, 3, requireGranted(t, three).Remaining)
		})
	}
}

// Who has left may use its charges again.
func TestCombiner_KeepsNoCharges(t *testing.T) {
	behindK1(t, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		charges := []client.Charge{{Policy: "p", Key: "k2"}}
		go func() { _, _ = limiter.AcquireAll(t.Context(), charges) }()
		synctest.Wait()
		charges[0].Key = "k3"
		_ = askAll(t.Context(), limiter, []string{"k4"})
		call := db.next(t)
		require.Equal(t, []string{"k2", "k4"}, call.keys)
		call.grant()
	})
}

// refuseFirst makes the first of the joint requests one that is refused.
func refuseFirst(p *packedAnswer) {
	p.requests, p.requestsAllowed, p.bindings = p.requests[1:], p.requestsAllowed[1:], p.bindings[1:]
	p.refused = []int64{1}
	p.codes, p.messages, p.details, p.hints = make([]pgtype.Text, 1), make([]pgtype.Text, 1), make([]pgtype.Text, 1), make([]pgtype.Text, 1)
}

// However little an answer fits, it fails its call and nothing else.
func TestCombiner_RefusesMisshapenAnswers(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]func(*packedAnswer){
		"too few numbers":         func(p *packedAnswer) { p.remaining = p.remaining[1:] },
		"no waits":                func(p *packedAnswer) { p.retryAfter = nil },
		"an element 0":            func(p *packedAnswer) { p.elements[0] = 0 },
		"an element too many":     func(p *packedAnswer) { p.elements[0] = 9 },
		"too few flags":           func(p *packedAnswer) { p.shadowed = []bool{true} },
		"a refusal without code":  func(p *packedAnswer) { refuseFirst(p); p.codes = nil },
		"a refusal without hint":  func(p *packedAnswer) { refuseFirst(p); p.hints = nil },
		"a request 0":             func(p *packedAnswer) { p.requests[0] = 0 },
		"a binding 0":             func(p *packedAnswer) { p.bindings[0] = 0 },
		"a binding too many":      func(p *packedAnswer) { p.bindings[0] = 3 },
		"too few bindings":        func(p *packedAnswer) { p.bindings = p.bindings[1:] },
		"too few flags of wholes": func(p *packedAnswer) { p.requestsReplayed = []bool{true} },
	} {
		t.Run(name, func(t *testing.T) {
			behindK1(t, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
				answers := []<-chan answer{
					askAll(t.Context(), limiter, []string{"k2", "k3"}), askAll(t.Context(), limiter, []string{"k4", "k5"}),
				}
				db.next(t).grantWith(spoil)
				for _, got := range answers {
					got := <-got
					require.EqualError(t, got.err, "pgratelimit: acquire all: an answer whose arrays do not fit together")
					require.Zero(t, got.JointDecision)
				}
			})
		})
	}
}

// The server says of a whole what it is: its binding charge need not be the one that a policy only watched. Its decisions are the
// caller's, who may append to them.
func TestCombiner_AWholeHasMarksAndDecisionsOfItsOwn(t *testing.T) {
	behindK1(t, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		one, two := askAll(t.Context(), limiter, []string{"k2", "k3"}), askAll(t.Context(), limiter, []string{"k4", "k5"})
		db.next(t).grantWith(func(packed *packedAnswer) {
			packed.requestsShadowed, packed.requestsReplayed = []bool{true, false}, []bool{false, true}
		})
		shadowed, replayed := <-one, <-two
		require.NoError(t, shadowed.err)
		require.NoError(t, replayed.err)
		require.True(t, shadowed.Shadowed && !shadowed.Replayed)
		require.True(t, !replayed.Shadowed && replayed.Replayed)
		require.EqualValues(t, 4, replayed.Decisions[0].Remaining)
		_ = append(shadowed.Decisions, client.Decision{})
		require.EqualValues(t, 4, replayed.Decisions[0].Remaining)
	})
}

// A request that the server passes over fails, and with a wrong number of answers all do. It is no denial.
func TestCombiner_ARequestWithoutAnAnswerFails(t *testing.T) {
	t.Parallel()
	for says, elements := range map[string][]int64{"no answer": {1, 1}, "1 answers to 2 requests": {1}, "3 answers to 2 requests": {1, 2, 2}} {
		t.Run(says, func(t *testing.T) {
			behindK1(t, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
				one, two := ask(t.Context(), limiter, "k2"), ask(t.Context(), limiter, "k3")
				db.next(t).grantWith(func(packed *packedAnswer) { packed.elements = elements })
				require.Equal(t, says == "no answer", (<-one).err == nil)
				require.EqualError(t, (<-two).err, "pgratelimit: acquire: "+says)
			})
		})
	}
}

// An answer to a request of one bucket has only a Decision, and perhaps an error.
type answer struct {
	client.JointDecision
	err error
}

// await makes a call beside the test, and returns when it waits in its turn.
func await(call func() (client.JointDecision, error)) <-chan answer {
	got := make(chan answer, 1)
	go func() {
		d, err := call()
		got <- answer{d, err}
	}()
	synctest.Wait()
	return got
}

// askAll charges the first bucket 1, the others 2.
func askAll(ctx context.Context, limiter client.Acquirer, keys []string, opts ...client.CallOption) <-chan answer {
	charges := make([]client.Charge, len(keys))
	for i, key := range keys {
		charges[i] = client.Charge{Policy: "p", Key: key}
		if i > 0 {
			charges[i].Cost = client.Cost(2)
		}
	}
	return await(func() (client.JointDecision, error) { return limiter.AcquireAll(ctx, charges, opts...) })
}

var once = []client.CallOption{client.IdempotencyKey("once")}

func ask(ctx context.Context, limiter client.Acquirer, key string, opts ...client.CallOption) <-chan answer {
	return askOf(ctx, limiter, "p", key, opts...)
}

func askOf(ctx context.Context, limiter client.Acquirer, policy, key string, opts ...client.CallOption) <-chan answer {
	return await(func() (client.JointDecision, error) {
		d, err := limiter.Acquire(ctx, policy, key, opts...)
		return client.JointDecision{Decision: d}, err
	})
}

// askKeys acquires n keys in turn. Their numbers begin at from.
func askKeys(ctx context.Context, limiter client.Acquirer, from, n int) (got []<-chan answer) {
	for key := range n {
		got = append(got, ask(ctx, limiter, fmt.Sprint("k", from+key)))
	}
	return got
}

// requireGranted returns the last decision.
func requireGranted(t *testing.T, answers ...<-chan answer) (d client.Decision) {
	for _, got := range answers {
		answer := <-got
		require.NoError(t, answer.err)
		require.True(t, answer.Allowed)
		d = answer.Decision
	}
	return d
}

// gatedPool is a database that answers when the test lets it. What remains in a bucket is the number
// that its key ends in.
type gatedPool struct {
	client.Pool // for the methods that are not called
	mu          sync.Mutex
	calls       []*gatedCall // under way
	most, total int
	takes       func(*gatedCall) time.Duration // if calls end by themselves
	over        chan struct{}                  // closed when the test is over: then calls fail
}

// gated returns a combiner on a gatedPool, to be called in a bubble. A test that fails leaves nobody waiting.
func gated(t *testing.T, opts ...client.Option) (*gatedPool, *client.Combiner) {
	db := &gatedPool{over: make(chan struct{})}
	limiter := client.NewCombiner(db, opts...)
	t.Cleanup(func() {
		if t.Failed() {
			close(db.over)
		}
		limiter.Close()
	})
	return db, limiter
}

// atGate runs a parallel test, in a bubble, of a combiner that makes so many calls at a time.
func atGate(t *testing.T, calls int, test func(*testing.T, *gatedPool, *client.Combiner), opts ...client.Option) {
	inBubble(t, func(t *testing.T) {
		db, limiter := gated(t, append(opts, client.CallsInFlight(calls))...)
		test(t, db, limiter)
	})
}

// behindK1 is atGate while the only call is under way, of a request for k1.
func behindK1(t *testing.T, test func(*testing.T, *gatedPool, *client.Combiner)) {
	atGate(t, 1, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		_ = ask(t.Context(), limiter, "k1")
		test(t, db, limiter)
	})
}

type gatedCall struct {
	ctx                  context.Context
	sql                  string
	batch                bool
	policies, keys, once []string
	costs, sizes         []int64
	answer               chan error // nil for a decision
	denied               time.Duration
	change               func(*packedAnswer) // before it is sent, or nil
}

func (c *gatedCall) grant() { c.answer <- nil }

func (c *gatedCall) grantWith(change func(*packedAnswer)) {
	c.change = change
	c.grant()
}

func (c *gatedCall) deny(retryAfter time.Duration) {
	c.denied = retryAfter
	c.answer <- nil
}

func (db *gatedPool) underWay() []*gatedCall {
	synctest.Wait()
	db.mu.Lock()
	defer db.mu.Unlock()
	return slices.Clone(db.calls)
}

func (db *gatedPool) grantAll() {
	for len(db.underWay()) > 0 {
		db.underWay()[0].grant()
	}
}

func (db *gatedPool) only(t *testing.T) *gatedCall {
	calls := db.underWay()
	require.Len(t, calls, 1)
	return calls[0]
}

// next grants the only call, and returns the call that follows.
func (db *gatedPool) next(t *testing.T) *gatedCall {
	db.only(t).grant()
	return db.only(t)
}

// second grants the first of two calls, and returns the call that follows.
func (db *gatedPool) second(t *testing.T) *gatedCall {
	require.Len(t, db.underWay(), 2)
	db.underWay()[0].grant()
	require.Len(t, db.underWay(), 2)
	return db.underWay()[1]
}

// beside returns the other calls under way.
func (db *gatedPool) beside(call *gatedCall) []*gatedCall {
	return slices.DeleteFunc(db.underWay(), func(c *gatedCall) bool { return c == call })
}

func (db *gatedPool) count() int {
	db.mu.Lock()
	defer db.mu.Unlock()
	return db.total
}

func (db *gatedPool) make(call *gatedCall) error {
	call.answer = make(chan error)
	db.mu.Lock()
	db.calls = append(db.calls, call)
	db.most = max(db.most, len(db.calls))
	db.total++
	var ends <-chan time.Time
	if db.takes != nil {
		ends = time.After(db.takes(call))
	}
	db.mu.Unlock()
	defer func() {
		db.mu.Lock()
		defer db.mu.Unlock()
		db.calls = slices.DeleteFunc(db.calls, func(c *gatedCall) bool { return c == call })
	}()
	select {
	case err := <-call.answer:
		return err
	case <-ends:
		return nil
	case <-call.ctx.Done():
		return call.ctx.Err()
	case <-db.over:
		return errors.New("the test has failed")
	}
}

func (c *gatedCall) row(key string) row {
	remaining, _ := strconv.ParseInt(strings.NewReplacer("k", "", "\xff", "").Replace(key), 10, 64)
	return row{c.denied == 0, remaining, c.denied.Microseconds(), int64(0), int64(1000), false, false}
}

func (db *gatedPool) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	call := newGatedCall(ctx, sql, args)
	if err := db.make(call); err != nil {
		return scanner{err}
	}
	return call.scanner()
}

func newGatedCall(ctx context.Context, sql string, args []any) *gatedCall {
	call := &gatedCall{ctx: ctx, sql: sql}
	switch {
	case strings.Contains(sql, "ratelimit_acquire_packed("):
		call.batch = true
		if args[3] != nil {
			call.sizes = slices.Clone(args[3].([]int64))
		}
		if args[4] != nil {
			call.once = slices.Clone(args[4].([]string))
		}
		fallthrough
	case strings.Contains(sql, "ratelimit_acquire_all("):
		call.policies = slices.Clone(args[0].([]string))
		call.keys = slices.Clone(args[1].([]string))
		call.costs = slices.Clone(args[2].([]int64))
	default:
		call.policies, call.keys = []string{args[0].(string)}, []string{""}
		if len(args) > 1 {
			call.keys[0], _ = args[1].(string)
		}
	}
	return call
}

func (c *gatedCall) scanner() scanner {
	switch {
	case c.batch:
		packed := c.packed()
		if c.change != nil {
			c.change(&packed)
		}
		return scanner{packed.row()}
	case c.costs != nil:
		return scanner{c.joint()}
	}
	return scanner{c.row(c.keys[0])}
}

func number(n int64) pgtype.Int8 { return pgtype.Int8{Int64: n, Valid: true} }

// joint is the answer to one request of several charges, of which the last binds.
func (c *gatedCall) joint() row {
	var numbers []pgtype.Int8
	for _, key := range c.keys {
		for _, value := range c.row(key) {
			switch value := value.(type) {
			case bool:
				numbers = append(numbers, number(map[bool]int64{true: 1}[value]))
			case int64:
				numbers = append(numbers, number(value))
			}
		}
	}
	return append(c.row(c.keys[len(c.keys)-1]), int64(len(c.keys)), numbers)
}

// packed is the answer to many requests, of which the last charge binds.
func (c *gatedCall) packed() (a packedAnswer) {
	for i, key := range c.keys {
		d := c.row(key)
		a.elements = append(a.elements, int64(i+1))
		a.remaining = append(a.remaining, d[1].(int64))
		a.retryAfter = append(a.retryAfter, number(d[2].(int64)))
		a.resetAfter = append(a.resetAfter, number(d[3].(int64)))
		a.capacity = append(a.capacity, d[4].(int64))
	}
	for i, size := range c.sizes {
		a.requests = append(a.requests, int64(i+1))
		a.requestsAllowed = append(a.requestsAllowed, c.denied == 0)
		a.bindings = append(a.bindings, int32(size))
	}
	return a
}

// packedAnswer is what ratelimit_acquire_packed returns.
type packedAnswer struct {
	elements, remaining    []int64
	retryAfter, resetAfter []pgtype.Int8
	capacity               []int64
	replayed, shadowed     []bool

	requests                                            []int64
	requestsAllowed, requestsReplayed, requestsShadowed []bool
	bindings                                            []int32

	refused                         []int64
	codes, messages, details, hints []pgtype.Text
}

func (a packedAnswer) row() row {
	columns := row{
		a.elements, a.remaining, a.retryAfter, a.resetAfter, a.capacity, a.replayed, a.shadowed,
		a.refused, a.codes, a.messages, a.details, a.hints,
	}
	if a.requests != nil {
		columns = append(columns, a.requests, a.requestsAllowed, a.requestsReplayed, a.requestsShadowed, a.bindings)
	}
	return columns
}

// requests are for one token each of the buckets of keys.
func requests(keys ...string) (list []client.Request) {
	for _, key := range keys {
		list = append(list, client.Request{Policy: "p", Key: key})
	}
	return list
}

// askMany asks for all in one call, beside the test.
func askMany(ctx context.Context, limiter *client.Combiner, list []client.Request) <-chan []client.Answer {
	got := make(chan []client.Answer, 1)
	go func() { got <- limiter.AcquireMany(ctx, list) }()
	synctest.Wait() // until they wait
	return got
}

func TestAcquireMany_RequestsShareOneCallAndAreAnsweredInOrder(t *testing.T) {
	var seen []client.Answer
	hooks := client.Hooks{Answered: func(_ context.Context, a client.Answer) { seen = append(seen, a) }}
	atGate(t, 2, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		list := requests("k3", "k1", strings.Repeat("k", 513), "k3", "k2", "a\x00b")
		list[1].Cost = client.Cost(20)
		got := askMany(t.Context(), limiter, list)
		require.Len(t, db.underWay(), 2, "a text that would fail the call travels alone")
		call := db.underWay()[0]
		if !call.batch {
			call = db.underWay()[1]
		}
		require.Equal(t, []string{"k3", "k1", "k3", "k2"}, call.keys)
		require.Equal(t, []int64{1, 20, 1, 1}, call.costs)
		db.grantAll()
		answers := <-got
		for i, remaining := range []int64{3, 1, 0, 3, 2} {
			require.NoError(t, answers[i].Err)
			require.Equal(t, remaining, answers[i].Decision.Remaining)
		}
		require.ErrorIs(t, answers[5].Err, client.ErrInvalidArgument)
		require.Equal(t, answers, seen)
		require.Equal(t, "acquire", seen[0].Operation)
	}, client.Observe(hooks))
}

func TestAcquireMany_TheEndOfContextEndsTheWait(t *testing.T) {
	behindK1(t, func(t *testing.T, db *gatedPool, limiter *client.Combiner) {
		ctx, leave := context.WithCancel(t.Context())
		got := askMany(ctx, limiter, requests("k2", "k3"))
		leave()
		for _, a := range <-got {
			require.ErrorIs(t, a.Err, context.Canceled)
		}
		require.Zero(t, limiter.Waiting())
		db.only(t).grant()
	})
}

func TestAcquireMany_MaxWaitingRefusesTheRequestsBeyondIt(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		db, limiter := gated(t, client.CallsInFlight(1), client.MaxWaiting(2))
		_ = ask(t.Context(), limiter, "k1")
		got := askMany(t.Context(), limiter, requests("k2", "k3", "k4"))
		db.grantAll()
		answers := <-got
		require.NoError(t, errors.Join(answers[0].Err, answers[1].Err))
		require.ErrorIs(t, answers[2].Err, client.ErrOverloaded)
		limiter.Close()
		require.ErrorIs(t, limiter.AcquireMany(t.Context(), requests("k1"))[0].Err, client.ErrClosed)
	})
}

// Package clienttest compares what is read of answers that fit.
func TestAcquireAll_RefusesAMisshapenAnswer(t *testing.T) {
	t.Parallel()
	charges := []client.Charge{{Policy: "p", Key: "k"}, {Policy: "q", Key: "l"}}
	fields := len(granted(1))
	for binding, numbers := range map[int64]int{1: fields, 0: 2 * fields, 3: 2 * fields} {
		db := &fakeDB{answers: []any{append(granted(1), binding, make([]pgtype.Int8, numbers))}}
		_, err := client.New(db).AcquireAll(t.Context(), charges)
		require.EqualError(t, err, fmt.Sprintf("pgratelimit: acquire all: %d numbers about 2 charges, of which %d is the binding one", numbers, binding))
	}
}
