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
	"testing"

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
func keyOn(shard, of int) string {
	i := 0
	for client.ShardOf(fmt.Sprint("user:", i), of) != shard {
		i++
	}
	return fmt.Sprint("user:", i)
}

// shardIs requires that an error is one of a shard.
func shardIs(t *testing.T, shard, of int, err error) {
	var e *client.ShardError
	require.ErrorAs(t, err, &e)
	require.Equal(t, [2]int{shard, of}, [2]int{e.Shard, e.Of}, "%v", err)
	require.ErrorContains(t, err, fmt.Sprintf("pgratelimit: shard %d of %d: ", shard, of))
}

// A numberedShard is a pool whose database says which shard it is, or fails to. Other calls get its answers.
type numberedShard struct {
	fakePool
	number, of int
	err        error
}

func (p *numberedShard) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	switch {
	case !strings.Contains(sql, "ratelimit_shard()"):
		return p.fakePool.QueryRow(ctx, sql, args...)
	case p.err != nil:
		return scanner{p.err}
	}
	return scanner{row{"app", nil, nil, int64(p.number), int64(p.of)}}
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

// A program starts beside a shard that is down. That shard is asked which it is before its first call, of whatever kind.
func TestNewSharded_StartsBesideAShardThatIsDown(t *testing.T) {
	t.Parallel()
	ctx, key := t.Context(), keyOn(1, 2)
	gone := errors.New("no route to host")
	up, down := &numberedShard{}, &numberedShard{err: pgError("57P03")}
	up.answers, down.answers = []any{granted(1)}, []any{granted(2)}
	limiter := noError(openNumbered(t, up, down))(t)
	err := errOf(limiter.Acquire(ctx, "api", key))
	shardIs(t, 1, 2, err)
	require.ErrorIs(t, err, down.err)
	require.NoError(t, errOf(limiter.Acquire(ctx, "api", keyOn(0, 2))), "the others do not wait for it")
	down.err, down.number = nil, 0
	require.ErrorIs(t, errOf(limiter.On(key).Peek(ctx, "api", key)), client.ErrWrongShard, "it was another database")
	require.ErrorIs(t, limiter.On(key).AcquireMany(ctx, requests(key))[0].Err, client.ErrWrongShard)
	down.number = 1
	require.EqualValues(t, 2, noError(limiter.On(key).Peek(ctx, "api", key))(t).Remaining)

	up.err, down.err = gone, gone
	_, err = openNumbered(t, up, down)
	shardIs(t, 0, 2, err)
	require.ErrorIs(t, err, gone)
}
