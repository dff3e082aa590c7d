package client_test

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
)

func TestShardOf_IsAsPublished(t *testing.T) {
	t.Parallel()
	text := noError(os.ReadFile("testdata/shards.json"))(t)
	var vectors []struct {
		Key, Hash string
		Of, Shard int
	}
	require.NoError(t, json.Unmarshal(text, &vectors))
	require.GreaterOrEqual(t, len(vectors), 20)
	for _, v := range vectors {
		require.Equal(t, v.Shard, client.ShardOf(v.Key, v.Of), "%q of %d", v.Key, v.Of)
		require.Equal(t, v.Shard, int(binary.BigEndian.Uint64(noError(hex.DecodeString(v.Hash))(t))%uint64(v.Of)), "%q of %d", v.Key, v.Of)
	}
	require.Equal(t, 2, client.ShardOf("user:42", 16))
	require.Equal(t, "ea3fd43be1e57d62", vectors[0].Hash)
}

// keyOn is the first key that a shard has.
func keyOn(shard, of int) string { return keysOn(shard, of, 1)[0] }

// keysOn are the first keys that a shard has.
func keysOn(shard, of, n int) (keys []string) {
	for i := 0; len(keys) < n; i++ {
		if key := fmt.Sprint("user:", i); client.ShardOf(key, of) == shard {
			keys = append(keys, key)
		}
	}
	return keys
}

// shardIs requires that an error is one of a shard.
func shardIs(t *testing.T, shard, of int, err error) {
	var e *client.ShardError
	require.ErrorAs(t, err, &e)
	require.Equal(t, [2]int{shard, of}, [2]int{e.Shard, e.Of}, "%v", err)
	require.ErrorContains(t, err, fmt.Sprintf("pgratelimit: shard %d of %d: ", shard, of))
}

// A numberedShard is a pool whose database says which shard it is, or fails to. It has overrides in their order, and other calls
// get its answers.
type numberedShard struct {
	fakePool
	number, of int
	err        error
	overrides  []client.Override
}

func (p *numberedShard) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	switch {
	case strings.Contains(sql, "ratelimit_shard()") && p.err != nil:
		return scanner{p.err}
	case strings.Contains(sql, "ratelimit_shard()"):
		return scanner{row{"app", nil, nil, int64(p.number), int64(p.of)}}
	case strings.Contains(sql, "ratelimit_overrides("):
		rows := []map[string]any{}
		for _, o := range p.overrides[:min(len(p.overrides), int(args[2].(int64)))] {
			rows = append(rows, map[string]any{"policy": o.Policy, "key": o.Key, "capacity": o.Capacity, "refill": o.Refill, "every": 0})
		}
		list, err := json.Marshal(rows)
		if err != nil {
			return scanner{err}
		}
		return scanner{row{string(list)}}
	}
	return p.fakePool.QueryRow(ctx, sql, args...)
}

// openNumbered opens shards, and numbers them.
func openNumbered(t *testing.T, shards ...*numberedShard) (*client.Sharded, error) {
	for i, s := range shards {
		s.number, s.of = i, len(shards)
	}
	limiter, err := client.NewSharded(t.Context(), shards)
	if err == nil {
		t.Cleanup(limiter.Close)
	}
	return limiter, err
}

// What shards say differently is all there: to errors.Is, and in words that name each shard.
func TestSharded_JoinsTheErrorsOfAllShardsThatDiffer(t *testing.T) {
	t.Parallel()
	codes := []string{"RL001", "RL001", "22023", "RL001"} // one alone differs
	shards := make([]*numberedShard, len(codes))
	for i, code := range codes {
		shards[i] = &numberedShard{fakePool: fakePool{fakeDB{answers: []any{pgError(code)}}}}
	}
	err := noError(openNumbered(t, shards...))(t).DefinePolicy(t.Context(), client.Policy{Name: "api"})
	require.ErrorIs(t, err, client.ErrUnknownPolicy)
	require.ErrorIs(t, err, client.ErrInvalidArgument)
	joined, ok := err.(interface{ Unwrap() []error })
	require.True(t, ok, "%T", err)
	require.Len(t, joined.Unwrap(), len(codes))
	for i, e := range joined.Unwrap() {
		shardIs(t, i, len(codes), e)
		require.ErrorContains(t, e, codes[i])
	}
}

// A database that has no place for a connection, or is starting, may be the right one: a program starts beside it. One that answers
// and cannot say which shard it is, is refused.
func TestNewSharded_TakesUnavailabilityForNoRefusal(t *testing.T) {
	inBubble(t, func(t *testing.T) {
		open := func(answer error) error { return errOf(openNumbered(t, &numberedShard{}, &numberedShard{err: answer})) }
		for _, code := range []string{"53300", "53400", "57P01", "57P03", "08006", "58030"} { // too many connections is the first
			require.NoError(t, open(pgError(code)), code)
		}
		require.NoError(t, open(errors.New("no route to host")))
		for _, code := range []string{"42883", "42501", "28P01", "3D000"} {
			err := open(pgError(code))
			require.ErrorContains(t, err, code)
			shardIs(t, 1, 2, err)
		}
	})
}

// A program starts beside a shard that is down. That shard is asked who it is before its first call.
func TestNewSharded_StartsBesideAShardThatIsDown(t *testing.T) {
	t.Parallel()
	ctx, key := t.Context(), keyOn(1, 2)
	gone := errors.New("no route to host")
	up, down := &numberedShard{}, &numberedShard{err: pgError("57P03")}
	up.answers, down.answers = []any{granted(1)}, []any{granted(2)}
	limiter := noError(openNumbered(t, up, down))(t)
	err := errOf(limiter.Peek(ctx, "api", key))
	shardIs(t, 1, 2, err)
	require.ErrorIs(t, err, down.err)
	require.NoError(t, errOf(limiter.Peek(ctx, "api", keyOn(0, 2))), "the others do not wait for it")
	down.err, down.number = nil, 0
	require.ErrorIs(t, errOf(limiter.Peek(ctx, "api", key)), client.ErrWrongShard, "it was another database")
	for _, hold := range []func(context.Context, string, string, ...client.CallOption) (*client.Hold, client.HoldDecision, error){limiter.Hold, limiter.HoldWait} {
		_, _, err := hold(ctx, "api", key)
		shardIs(t, 1, 2, err)
		require.ErrorIs(t, err, client.ErrWrongShard)
	}
	down.number = 1
	require.EqualValues(t, 2, noError(limiter.Peek(ctx, "api", key))(t).Remaining)

	up.err, down.err = gone, gone
	_, err = openNumbered(t, up, down)
	shardIs(t, 0, 2, err)
	require.ErrorIs(t, err, gone)
}

// A policy that is dropped again, since a shard was down, is unknown to the others. The error is that shard's.
func TestSharded_DropPolicyNamesTheShardThatIsDown(t *testing.T) {
	t.Parallel()
	gone, unknown := errors.New("no route to host"), pgError("RL001")
	shards := []*numberedShard{{}, {}}
	shards[0].answers = []any{row{1}, unknown}
	shards[1].answers = []any{gone, gone, row{1}, unknown}
	limiter := noError(openNumbered(t, shards...))(t)
	for range 2 {
		err := limiter.DropPolicy(t.Context(), "api")
		shardIs(t, 1, 2, err)
		require.ErrorIs(t, err, gone)
		require.NotErrorIs(t, err, client.ErrUnknownPolicy)
	}
	require.NoError(t, limiter.DropPolicy(t.Context(), "api"))
	require.ErrorIs(t, limiter.DropPolicy(t.Context(), "api"), client.ErrUnknownPolicy)
}

// The order is that of one database, in bytes: the policy is first, whichever shard has the key.
func TestSharded_OverridesAreOrderedByPolicyAndThenByKey(t *testing.T) {
	t.Parallel()
	var shards [2]numberedShard
	var want []client.Override
	for _, policy := range []string{"B", "a"} {
		for i := range 8 {
			o := client.Override{Policy: policy, Key: fmt.Sprint("user:", i), Capacity: 1, Refill: 1}
			has := &shards[client.ShardOf(o.Key, len(shards))]
			has.overrides, want = append(has.overrides, o), append(want, o)
		}
	}
	limiter := noError(openNumbered(t, &shards[0], &shards[1]))(t)
	for _, rows := range []int{1, 7, 8, 9, 16, 1000} {
		require.Equal(t, want[:min(rows, len(want))], noError(limiter.Overrides(t.Context(), client.MaxRows(int32(rows))))(t))
	}
}

// A shard may have more overrides of keys that are another's than a list is long, before its own. The other need not have them still.
func TestSharded_OverridesAreFoundBehindThoseOfOtherShards(t *testing.T) {
	t.Parallel()
	shards := []*numberedShard{{}, {}}
	for _, key := range keysOn(0, 2, 100) {
		shards[1].overrides = append(shards[1].overrides, client.Override{Policy: "api", Key: key, Capacity: 1, Refill: 1})
	}
	own := client.Override{Policy: "b", Key: keyOn(1, 2), Capacity: 1, Refill: 1}
	shards[1].overrides = append(shards[1].overrides, own)
	limiter := noError(openNumbered(t, shards...))(t)
	for _, rows := range []int32{1, 2, 99, 100, 101} {
		require.Equal(t, []client.Override{own}, noError(limiter.Overrides(t.Context(), client.MaxRows(rows)))(t), "%d rows", rows)
	}
}

// A silentShard does not say which shard it is until the context ends, or it is let.
type silentShard struct {
	numberedShard
	asked atomic.Int64
	let   chan struct{}
}

func (p *silentShard) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if strings.Contains(sql, "ratelimit_shard()") {
		p.asked.Add(1)
		select {
		case <-p.let:
		case <-ctx.Done():
			return scanner{ctx.Err()}
		}
	}
	return p.numberedShard.QueryRow(ctx, sql, args...)
}

// calls are how often it was asked which shard it is, since the last look.
func (p *silentShard) calls() int { return int(p.asked.Swap(0)) }

// However many callers a silent shard has, it is asked once at a time which one it is. Each caller leaves when its ctx ends, and
// all go on when there is an answer.
func TestSharded_ASilentShardIsAskedWhichItIsOnceAtATime(t *testing.T) {
	t.Parallel()
	for _, ending := range []string{"answer", "close"} {
		t.Run(ending, func(t *testing.T) {
			inBubble(t, func(t *testing.T) {
				const callers = 100
				ctx := t.Context()
				up := &silentShard{numberedShard: numberedShard{number: 0, of: 2}, let: make(chan struct{})}
				silent := &silentShard{numberedShard: numberedShard{number: 1, of: 2}, let: make(chan struct{})}
				silent.answers = []any{granted(5)}
				close(up.let)
				limiter := noError(client.NewSharded(ctx, []client.Pool{up, silent}))(t)
				defer limiter.Close()
				synctest.Wait() // until that call has ended, too
				require.Equal(t, 1, silent.calls())

				errs := make(chan error, callers)
				ask := func(ctx context.Context) {
					for range callers {
						go func() { errs <- errOf(limiter.Peek(ctx, "api", keyOn(1, 2))) }()
					}
				}
				short, cancel := context.WithTimeout(ctx, time.Second)
				defer cancel()
				begin := time.Now()
				ask(short)
				for range callers {
					err := <-errs
					require.ErrorIs(t, err, context.DeadlineExceeded)
					shardIs(t, 1, 2, err)
				}
				require.Equal(t, time.Second, time.Since(begin))
				ask(ctx)
				synctest.Wait()
				require.Equal(t, 1, silent.calls())

				var want error
				if ending == "answer" {
					close(silent.let)
				} else {
					limiter.Close()
					want = client.ErrClosed
				}
				for range callers {
					require.ErrorIs(t, <-errs, want)
				}
				require.Less(t, time.Since(begin), 2*time.Second)
				require.ErrorIs(t, errOf(limiter.Peek(ctx, "api", keyOn(1, 2))), want)
				require.Zero(t, silent.calls())
			})
		})
	}
}
