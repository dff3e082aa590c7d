package client_test

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestShardOf_IsAsPublished(t *testing.T) {
	t.Parallel()
	text, err := os.ReadFile("testdata/shards.json")
	require.NoError(t, err)
	var vectors []struct {
		Key, Hash string
		Of, Shard int
	}
	require.NoError(t, json.Unmarshal(text, &vectors))
	require.GreaterOrEqual(t, len(vectors), 20)
	for _, v := range vectors {
		require.Equal(t, v.Shard, client.ShardOf(v.Key, v.Of), "%q of %d", v.Key, v.Of)
		hash, err := hex.DecodeString(v.Hash)
		require.NoError(t, err)
		require.Equal(t, v.Shard, int(binary.BigEndian.Uint64(hash)%uint64(v.Of)), "%q of %d", v.Key, v.Of)
	}
	require.Equal(t, 2, client.ShardOf("user:42", 16))
	require.Equal(t, "ea3fd43be1e57d62", vectors[0].Hash)
}

// shards are databases that are numbered, and the pools that lead there.
type shards struct {
	dbs   []*pgtest.DB
	pools []*pgxpool.Pool
}

func newShards(t *testing.T, of int) (s shards) {
	t.Helper()
	for n := range of {
		db := pgtest.New(t)
		db.Exec(t, "select ratelimit_define_shard($1, $2)", n, of)
		s.dbs, s.pools = append(s.dbs, db), append(s.pools, db.Pool)
	}
	return s
}

func (s shards) open(t *testing.T) *client.Sharded {
	t.Helper()
	limiter, err := client.NewSharded(t.Context(), s.pools)
	require.NoError(t, err)
	t.Cleanup(limiter.Close)
	return limiter
}

// keyOn is a key that a shard has.
func keyOn(shard, of int) string { return slices.Collect(keysOn(shard, of, 1))[0] }

// keysOn are so many keys that a shard has.
func keysOn(shard, of, n int) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for i := 0; n > 0; i++ {
			if key := fmt.Sprint("user:", i); client.ShardOf(key, of) == shard {
				n--
				if !yield(key) {
					return
				}
			}
		}
	}
}

// shardIs requires that an error is one of a shard.
func shardIs(t *testing.T, shard, of int, err error) {
	t.Helper()
	var e *client.ShardError
	require.ErrorAs(t, err, &e)
	require.Equal(t, [2]int{shard, of}, [2]int{e.Shard, e.Of}, "%v", err)
	require.ErrorContains(t, err, fmt.Sprintf("pgratelimit: shard %d of %d: ", shard, of))
}

// Each method about a key finds the bucket in the database that ShardOf names, and no other.
func TestSharded_EachCallGoesToTheShardOfItsKey(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	const of = 4
	s := newShards(t, of)
	limiter := s.open(t)
	require.NoError(t, limiter.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 100, Refill: 1, Every: time.Hour}))
	require.NoError(t, limiter.DefinePolicy(ctx, client.Policy{Name: "org", Capacity: 100, Refill: 1, Every: time.Hour}))

	for shard := range of {
		key := keyOn(shard, of)
		here := client.New(s.pools[shard])
		left := func(want int64) {
			t.Helper()
			for n, pool := range s.pools {
				d, err := client.New(pool).Peek(ctx, "api", key)
				require.NoError(t, err)
				if n != shard {
					require.EqualValues(t, 100, d.Remaining, "shard %d does not know the key of shard %d", n, shard)
				} else {
					require.Equal(t, want, d.Remaining)
				}
			}
			d, err := limiter.Peek(ctx, "api", key)
			require.NoError(t, err)
			require.Equal(t, want, d.Remaining)
		}
		d, err := limiter.Acquire(ctx, "api", key, client.Cost(10), client.IdempotencyKey("estimate"))
		require.NoError(t, err)
		require.True(t, d.Allowed)
		left(90)
		_, err = limiter.Settle(ctx, "api", key, "estimate", 20)
		require.NoError(t, err)
		left(80)
		_, err = limiter.Charge(ctx, "api", key, 10)
		require.NoError(t, err)
		left(70)
		_, err = limiter.Refund(ctx, "api", key, 5)
		require.NoError(t, err)
		left(75)
		r, err := limiter.Reserve(ctx, "api", key, 0, client.Cost(5))
		require.NoError(t, err)
		require.True(t, r.Allowed)
		left(70)
		r, err = limiter.Wait(ctx, "api", key, client.Cost(5))
		require.NoError(t, err)
		require.True(t, r.Allowed)
		left(65)
		part, err := limiter.AcquireUpTo(ctx, "api", key, 5)
		require.NoError(t, err)
		require.EqualValues(t, 5, part.Taken)
		left(60)
		joint, err := limiter.AcquireAll(ctx, []client.Charge{{Policy: "api", Key: key, Cost: client.Cost(5)}, {Policy: "org", Key: key}})
		require.NoError(t, err)
		require.True(t, joint.Allowed)
		left(55)
		require.NoError(t, limiter.Override(ctx, client.Override{Policy: "api", Key: key, Capacity: 50, Refill: 1, Every: time.Hour}))
		require.NoError(t, limiter.Reset(ctx, "api", key))
		d, err = here.Peek(ctx, "api", key)
		require.NoError(t, err)
		require.EqualValues(t, 50, d.Remaining)

		only, err := limiter.Overrides(ctx, client.OfKey(key))
		require.NoError(t, err)
		require.Len(t, only, 1)
	}

	all, err := limiter.Overrides(ctx)
	require.NoError(t, err)
	require.Len(t, all, of)
	require.True(t, slices.IsSortedFunc(all, func(a, b client.Override) int { return slices.Compare([]string{a.Key}, []string{b.Key}) }))
	some, err := limiter.Overrides(ctx, client.OfPolicy("api"), client.MaxRows(2))
	require.NoError(t, err)
	require.Equal(t, all[:2], some)
	removed, err := limiter.RemoveOverride(ctx, "api", keyOn(1, of))
	require.NoError(t, err)
	require.True(t, removed)
	all, err = limiter.Overrides(ctx)
	require.NoError(t, err)
	require.Len(t, all, of-1)
}

func TestSharded_PoliciesAreThoseOfAllShards(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	const of = 4
	s := newShards(t, of)
	limiter := s.open(t)
	policy := client.Policy{Name: "api", Capacity: 10, Refill: 1, Every: time.Hour, Stepped: client.No, Durable: client.Yes, Remember: 24 * time.Hour, Shadow: client.No}
	require.ErrorIs(t, limiter.DropPolicy(ctx, "api"), client.ErrUnknownPolicy)

	// A part of the shards, as after an error.
	for _, pool := range s.pools[:2] {
		require.NoError(t, client.New(pool).DefinePolicy(ctx, policy))
	}
	_, err := limiter.Policies(ctx)
	shardIs(t, 2, of, err)
	require.ErrorContains(t, err, "differ")
	for range 2 {
		require.NoError(t, limiter.DefinePolicy(ctx, policy))
		policies, err := limiter.Policies(ctx)
		require.NoError(t, err)
		require.Equal(t, []client.Policy{policy}, policies)
	}

	require.NoError(t, client.New(s.pools[3]).DropPolicy(ctx, "api"))
	require.NoError(t, limiter.DropPolicy(ctx, "api"), "what is left of it")
	require.ErrorIs(t, limiter.DropPolicy(ctx, "api"), client.ErrUnknownPolicy)

	err = limiter.DefinePolicy(ctx, client.Policy{Name: "api"})
	require.ErrorIs(t, err, client.ErrInvalidArgument)
	require.NotContains(t, err.Error(), "shard", "they all say so")
	s.dbs[1].Exec(t, "drop function ratelimit_define_policy")
	s.dbs[3].Exec(t, "drop function ratelimit_define_policy")
	err = limiter.DefinePolicy(ctx, policy)
	shardIs(t, 1, of, err)
	require.ErrorContains(t, err, "shard 3 of 4: define policy: ")
}

func TestSharded_ChargesOfSeveralShardsAreRefused(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	s := newShards(t, 2)
	limiter := s.open(t)
	require.NoError(t, limiter.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 10, Refill: 1, Every: time.Hour}))
	here, there := keyOn(0, 2), keyOn(1, 2)
	_, err := limiter.AcquireAll(ctx, []client.Charge{{Policy: "api", Key: here}, {Policy: "api", Key: here}, {Policy: "api", Key: there}})
	require.ErrorIs(t, err, client.ErrSeveralShards)
	require.ErrorIs(t, err, client.ErrInvalidArgument)
	require.ErrorContains(t, err, "charge 0 to shard 0 and charge 2 to shard 1 of 2")
	require.ErrorContains(t, err, "the same key")
	require.NotContains(t, err.Error(), here, "who may not see keys may see errors")
	for _, key := range []string{here, there} {
		d, err := limiter.Peek(ctx, "api", key)
		require.NoError(t, err)
		require.EqualValues(t, 10, d.Remaining)
	}
	_, err = limiter.AcquireAll(ctx, nil)
	require.ErrorIs(t, err, client.ErrInvalidArgument)
	require.NotErrorIs(t, err, client.ErrSeveralShards)
	_, err = limiter.AcquireAll(ctx, []client.Charge{{Policy: "nobody", Key: there}, {Policy: "api", Key: there}})
	require.ErrorIs(t, err, client.ErrUnknownPolicy)
	shardIs(t, 1, 2, err)
}

func TestSharded_CleanUp(t *testing.T) {
	t.Parallel()
	const of = 2
	s := newShards(t, of)
	limiter := s.open(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	require.NoError(t, limiter.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 10, Refill: 10, Every: time.Microsecond, Remember: time.Microsecond}))
	use := func() {
		for shard, db := range s.dbs {
			db.Exec(t, "select ratelimit_acquire('api', $1, 1, 'x')", keyOn(shard, of))
			db.Exec(t, "update ratelimit.buckets set due_at = now() - interval '1 day', refilled_at = now() - interval '1 day'")
			db.Exec(t, "update ratelimit.idempotency_keys set expires_at = now() - interval '1 day'")
		}
	}
	use()
	cleaned, err := limiter.Cleanup(ctx, client.MaxRows(1))
	require.NoError(t, err)
	require.Equal(t, client.Cleaned{Buckets: of, IdempotencyKeys: of}, cleaned)
	use()
	done := make(chan struct{})
	go func() {
		defer close(done)
		limiter.RunCleanup(ctx, time.Millisecond)
	}()
	for _, db := range s.dbs {
		db.Await(t, time.Minute, "select not exists (select from ratelimit.idempotency_keys)")
	}
	stop()
	<-done

	_, err = s.pools[1].Exec(t.Context(), "drop procedure ratelimit_cleanup_all")
	require.NoError(t, err)
	ctx, stop = context.WithCancel(t.Context())
	var once sync.Once
	limiter.RunCleanup(ctx, time.Millisecond, client.OnError(func(err error) {
		once.Do(func() {
			shardIs(t, 1, of, err)
			stop()
		})
	}))
}

// Each way to list the wrong databases is told from the others, with the database and what helps.
func TestNewSharded_RefusesWhatIsWrong(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	const of = 4
	s := newShards(t, of)
	p := s.pools
	open := func(pools ...*pgxpool.Pool) error {
		limiter, err := client.NewSharded(ctx, pools)
		if err == nil {
			limiter.Close()
		}
		return err
	}
	require.NoError(t, open(p...))

	unnumbered, other, absent, bare := pgtest.New(t), pgtest.New(t), pgtest.New(t), pgtest.Empty(t)
	other.Exec(t, "select ratelimit_define_shard(1, 8)")
	config := p[0].Config()
	config.ConnConfig.Database = "nowhere " + absent.Name
	nowhere, err := pgxpool.NewWithConfig(ctx, config)
	require.NoError(t, err)
	t.Cleanup(nowhere.Close)
	for name, test := range map[string]struct {
		pools []*pgxpool.Pool
		wrong []int // shards that are
		says  []string
	}{
		"swapped":       {[]*pgxpool.Pool{p[0], p[2], p[1], p[3]}, []int{1, 2}, []string{s.dbs[2].Name + `"`, "is shard 2 of 4", "in the order of their numbers"}},
		"twice":         {[]*pgxpool.Pool{p[0], p[1], p[1], p[3]}, []int{2}, []string{s.dbs[1].Name + `"`, "is shard 1 of 4", "each once"}},
		"too few":       {[]*pgxpool.Pool{p[0], p[1]}, []int{0, 1}, []string{s.dbs[0].Name + `"`, "is shard 0 of 4. List all 4 databases"}},
		"too many":      {slices.Concat(p, p), []int{0, 1, 2, 3, 4, 5, 6, 7}, []string{"is shard 0 of 4. List all 4 databases"}},
		"another set's": {[]*pgxpool.Pool{p[0], other.Pool, p[2], p[3]}, []int{1}, []string{other.Name + `"`, "is shard 1 of 8"}},
		"unnumbered":    {[]*pgxpool.Pool{p[0], p[1], p[2], unnumbered.Pool}, []int{3}, []string{unnumbered.Name + `"`, "is no shard", "select ratelimit_define_shard(3, 4);"}},
	} {
		err := open(test.pools...)
		require.ErrorIs(t, err, client.ErrWrongShard, name)
		for _, says := range test.says {
			require.ErrorContains(t, err, says, name)
		}
		for shard := range test.pools {
			prefix := fmt.Sprintf("shard %d of %d: check the shard: wrong shard: ", shard, len(test.pools))
			if slices.Contains(test.wrong, shard) {
				require.ErrorContains(t, err, prefix, name)
			} else {
				require.NotContains(t, err.Error(), prefix, name)
			}
		}
	}
	for _, pools := range [][]*pgxpool.Pool{nil, p[:3]} {
		require.ErrorIs(t, open(pools...), client.ErrWrongShard)
		require.ErrorContains(t, open(pools...), "power of two")
	}
	err = open(p[0], p[1], nowhere, p[3])
	shardIs(t, 2, of, err)
	require.ErrorContains(t, err, "3D000")
	err = open(p[0], p[1], p[2], bare.Pool)
	shardIs(t, 3, of, err)
	require.ErrorContains(t, err, "Install pgratelimit in this database")
}

// A program that was given one shard's URL would find full buckets there: those of the keys that are elsewhere.
func TestAlone_RefusesAShard(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	shard, single, plain := newShards(t, 2).dbs[1], newShards(t, 1).dbs[0], pgtest.New(t)
	for _, db := range []*pgtest.DB{shard, single, plain} {
		db.Exec(t, "select ratelimit_define_policy('api', 10, 0, '1 day')")
	}
	acquirers := func(db *pgtest.DB) map[string]client.Acquirer {
		combiner, leaser := client.NewCombiner(db.Pool, client.Alone()), client.NewLeaser(db.Pool, client.Alone(), client.Lease{Policy: "api"})
		t.Cleanup(combiner.Close)
		t.Cleanup(leaser.Close)
		return map[string]client.Acquirer{"limiter": client.New(db.Pool, client.Alone()), "combiner": combiner, "leaser": leaser}
	}
	for name, limiter := range acquirers(shard) {
		for range 2 {
			_, err := limiter.Acquire(ctx, "api", "k")
			require.ErrorIs(t, err, client.ErrWrongShard, name)
			require.ErrorContains(t, err, shard.Name+`"`, name)
			require.ErrorContains(t, err, "is shard 1 of 2: buckets of most keys are elsewhere, and would be full here. List all 2 databases", name)
		}
	}
	_, err := client.New(shard.Pool, client.Alone()).Policies(ctx)
	require.ErrorIs(t, err, client.ErrWrongShard)
	require.ErrorIs(t, client.CheckAlone()(ctx, shard.Connect(t)), client.ErrWrongShard)
	for _, db := range []*pgtest.DB{single, plain} {
		for name, limiter := range acquirers(db) {
			d, err := limiter.Acquire(ctx, "api", name)
			require.NoError(t, err, name)
			require.True(t, d.Allowed)
		}
		require.NoError(t, client.CheckAlone()(ctx, db.Connect(t)))
	}
	d, err := client.New(shard.Pool).Peek(ctx, "api", "k")
	require.NoError(t, err)
	require.EqualValues(t, 10, d.Remaining)

	asked := client.New(plain.Pool, client.Alone()) // it asks once
	_, err = asked.Peek(ctx, "api", "k")
	require.NoError(t, err)
	plain.Exec(t, "drop function ratelimit_shard()")
	_, err = asked.Peek(ctx, "api", "k")
	require.NoError(t, err)
}

// A connection to the wrong database is refused, too, when it is made later.
func TestCheckShard_RefusesConnections(t *testing.T) {
	t.Parallel()
	s := newShards(t, 2)
	connect := func(shard, of int) error {
		config := s.pools[1].Config()
		config.AfterConnect = client.CheckShard(shard, of, client.Schema("public"))
		pool, err := pgxpool.NewWithConfig(t.Context(), config)
		require.NoError(t, err)
		defer pool.Close()
		return pool.Ping(t.Context())
	}
	require.NoError(t, connect(1, 2))
	for _, wrong := range [][2]int{{0, 2}, {1, 4}} {
		err := connect(wrong[0], wrong[1])
		require.ErrorIs(t, err, client.ErrWrongShard)
		shardIs(t, wrong[0], wrong[1], err)
	}
}

// unreachable is a pool of a database that nobody can reach, until it can.
type unreachable struct {
	*pgxpool.Pool
	mu  sync.Mutex
	err error
}

func (u *unreachable) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.err != nil {
		return scanner{u.err}
	}
	return u.Pool.QueryRow(ctx, sql, args...)
}

func (u *unreachable) fail(err error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.err = err
}

// A program starts beside a shard that is down. That shard is asked who it is before its first call.
func TestNewSharded_StartsBesideAShardThatIsDown(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	const of = 2
	s := newShards(t, of)
	down := &pgconn.PgError{Code: "57P03", Message: "the database system is starting up", Severity: "FATAL", SeverityUnlocalized: "FATAL"}
	up, other := &unreachable{Pool: s.pools[0]}, &unreachable{Pool: s.pools[1], err: down}
	limiter, err := client.NewSharded(ctx, []client.Pool{up, other})
	require.NoError(t, err)
	defer limiter.Close()

	_, err = limiter.Acquire(ctx, "api", keyOn(1, of))
	require.ErrorIs(t, err, down)
	shardIs(t, 1, of, err)
	err = limiter.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 10, Refill: 1, Every: time.Hour})
	shardIs(t, 1, of, err)
	_, err = limiter.Acquire(ctx, "api", keyOn(0, of))
	require.NoError(t, err, "the others have it")

	other.Pool = s.pools[0]
	other.fail(nil)
	_, err = limiter.Acquire(ctx, "api", keyOn(1, of))
	require.ErrorIs(t, err, client.ErrWrongShard, "it was another database")
	other.Pool = s.pools[1]
	require.NoError(t, limiter.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 10, Refill: 1, Every: time.Hour}))
	d, err := limiter.Acquire(ctx, "api", keyOn(1, of))
	require.NoError(t, err)
	require.True(t, d.Allowed)

	up.fail(errors.New("no route to host"))
	other.fail(errors.New("no route to host"))
	_, err = client.NewSharded(ctx, []client.Pool{up, other})
	shardIs(t, 0, of, err)
	require.ErrorContains(t, err, "no route to host")
}

func TestSharded_Close(t *testing.T) {
	t.Parallel()
	s := newShards(t, 2)
	limiter := s.open(t)
	limiter.Close()
	_, err := limiter.Acquire(t.Context(), "api", "k")
	require.ErrorIs(t, err, client.ErrClosed)
	limiter.Close()
}

// A set that has one answer however it is asked: of 2, of 4, and so on, with keys spread evenly.
func TestShardOf_SpreadsKeys(t *testing.T) {
	t.Parallel()
	count := map[int]int{}
	const keys, of = 16_000, 16
	for i := range keys {
		key := fmt.Sprint("user:", i)
		shard := client.ShardOf(key, of)
		count[shard]++
		require.Equal(t, shard%2, client.ShardOf(key, 2))
	}
	require.Len(t, count, of)
	require.Greater(t, slices.Min(slices.Collect(maps.Values(count))), keys/of*8/10)
}

// Copies of a database have all of its overrides. Each is listed once, also when those of others fill the list of a shard.
func TestSharded_OverridesAreThoseOfTheShardsOwnKeys(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	const of = 2
	s := newShards(t, of)
	limiter := s.open(t)
	require.NoError(t, limiter.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 10, Refill: 1, Every: time.Hour}))
	var all []string
	for i := range 40 {
		key := fmt.Sprintf("user:%02d", i)
		all = append(all, key)
		for shard, pool := range s.pools {
			capacity := int64(99) // is out of date
			if client.ShardOf(key, of) == shard {
				capacity = 5
			}
			require.NoError(t, client.New(pool).Override(ctx, client.Override{Policy: "api", Key: key, Capacity: capacity}))
		}
	}
	for _, rows := range []int{1, 2, 3, 10, 39, 40, 41, 1000} {
		list, err := limiter.Overrides(ctx, client.MaxRows(int32(rows)))
		require.NoError(t, err)
		var keys []string
		for _, o := range list {
			keys = append(keys, o.Key)
			require.EqualValues(t, 5, o.Capacity, o.Key)
		}
		require.Equal(t, all[:min(rows, len(all))], keys)
	}
	_, err := limiter.Overrides(ctx, client.MaxRows(0))
	require.ErrorIs(t, err, client.ErrInvalidArgument)
}

// A policy that is dropped again, since a shard was down, is unknown to the others. The error is that shard's.
func TestSharded_DropPolicyNamesTheShardThatIsDown(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	const of = 2
	s := newShards(t, of)
	other := &unreachable{Pool: s.pools[1]}
	limiter, err := client.NewSharded(ctx, []client.Pool{s.pools[0], other})
	require.NoError(t, err)
	defer limiter.Close()
	require.NoError(t, limiter.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 10, Refill: 1, Every: time.Hour}))
	other.fail(errors.New("no route to host"))
	for range 2 {
		err := limiter.DropPolicy(ctx, "api")
		shardIs(t, 1, of, err)
		require.ErrorContains(t, err, "no route to host")
		require.NotErrorIs(t, err, client.ErrUnknownPolicy)
	}
	other.fail(nil)
	require.NoError(t, limiter.DropPolicy(ctx, "api"))
	require.ErrorIs(t, limiter.DropPolicy(ctx, "api"), client.ErrUnknownPolicy)
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
		list, err := json.Marshal(p.overrides[:min(len(p.overrides), int(args[2].(int64)))])
		if err != nil {
			return scanner{err}
		}
		return scanner{row{string(list)}}
	}
	return p.fakePool.QueryRow(ctx, sql, args...)
}

// openNumbered opens shards, and numbers them.
func openNumbered(t *testing.T, shards ...*numberedShard) (*client.Sharded, error) {
	t.Helper()
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
	limiter, err := openNumbered(t, shards...)
	require.NoError(t, err)
	err = limiter.DefinePolicy(t.Context(), client.Policy{Name: "api"})
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
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		open := func(answer error) error {
			_, err := openNumbered(t, &numberedShard{}, &numberedShard{err: answer})
			return err
		}
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
	limiter, err := openNumbered(t, &shards[0], &shards[1])
	require.NoError(t, err)
	for _, rows := range []int{1, 7, 8, 9, 16, 1000} {
		list, err := limiter.Overrides(t.Context(), client.MaxRows(int32(rows)))
		require.NoError(t, err)
		require.Equal(t, want[:min(rows, len(want))], list)
	}
}

// A shard may have more overrides of keys that are another's than a list is long, before its own. The other need not have them still.
func TestSharded_OverridesAreFoundBehindThoseOfOtherShards(t *testing.T) {
	t.Parallel()
	shards := []*numberedShard{{}, {}}
	for key := range keysOn(0, 2, 100) {
		shards[1].overrides = append(shards[1].overrides, client.Override{Policy: "api", Key: key, Capacity: 1, Refill: 1})
	}
	own := client.Override{Policy: "b", Key: keyOn(1, 2), Capacity: 1, Refill: 1}
	shards[1].overrides = append(shards[1].overrides, own)
	limiter, err := openNumbered(t, shards...)
	require.NoError(t, err)
	for _, rows := range []int32{1, 2, 99, 100, 101} {
		list, err := limiter.Overrides(t.Context(), client.MaxRows(rows))
		require.NoError(t, err)
		require.Equal(t, []client.Override{own}, list, "%d rows", rows)
	}
}

// A silentShard does not say which shard it is until the context ends, or it is let.
type silentShard struct {
	numberedShard
	mu    sync.Mutex
	asked int
	let   chan struct{}
}

func (p *silentShard) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if strings.Contains(sql, "ratelimit_shard()") {
		p.mu.Lock()
		p.asked++
		p.mu.Unlock()
		select {
		case <-p.let:
		case <-ctx.Done():
			return scanner{ctx.Err()}
		}
	}
	return p.numberedShard.QueryRow(ctx, sql, args...)
}

// calls are how often it was asked which shard it is, since the last look.
func (p *silentShard) calls() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := p.asked
	p.asked = 0
	return n
}

// However many callers a silent shard has, it is asked once at a time which one it is. Each caller leaves when its ctx ends, and
// all go on when there is an answer.
func TestSharded_ASilentShardIsAskedWhichItIsOnceAtATime(t *testing.T) {
	t.Parallel()
	for _, ending := range []string{"answer", "close"} {
		t.Run(ending, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				const callers = 100
				ctx := t.Context()
				up := &silentShard{numberedShard: numberedShard{number: 0, of: 2}, let: make(chan struct{})}
				silent := &silentShard{numberedShard: numberedShard{number: 1, of: 2}, let: make(chan struct{})}
				silent.answers = []any{granted(5)}
				close(up.let)
				limiter, err := client.NewSharded(ctx, []client.Pool{up, silent})
				require.NoError(t, err)
				defer limiter.Close()
				synctest.Wait() // until that call has ended, too
				require.Equal(t, 1, silent.calls())

				errs := make(chan error, callers)
				ask := func(ctx context.Context) {
					for range callers {
						go func() {
							_, err := limiter.Peek(ctx, "api", keyOn(1, 2))
							errs <- err
						}()
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
				_, err = limiter.Peek(ctx, "api", keyOn(1, 2))
				require.ErrorIs(t, err, want)
				require.Zero(t, silent.calls())
			})
		})
	}
}

// With a Lease each shard leases its own keys, and gives back what is left when it is closed.
func TestSharded_Leases(t *testing.T) {
	t.Parallel()
	s := newShards(t, 2)
	for _, db := range s.dbs {
		db.Exec(t, "select ratelimit_define_policy('busy', 1000000, 1, '1 day')")
	}
	limiter, err := client.NewSharded(t.Context(), s.pools, client.Lease{Policy: "busy"})
	require.NoError(t, err)
	var granted, leased [2]atomic.Int64
	var callers sync.WaitGroup
	for n := range s.dbs {
		for range 8 { // whose calls are combined: a bucket is hot at once, on a slow machine, too
			callers.Go(func() {
				for leased[n].Load() < 100 && granted[n].Load() < 100_000 {
					d, err := limiter.Acquire(t.Context(), "busy", keyOn(n, 2))
					if err != nil || !d.Allowed {
						t.Errorf("%+v, %v", d, err)
						return
					}
					granted[n].Add(1)
					if d.Estimated {
						leased[n].Add(1)
					}
				}
			})
		}
	}
	callers.Wait()
	limiter.Close()
	for n, pool := range s.pools {
		d, err := client.New(pool).Peek(t.Context(), "busy", keyOn(n, 2))
		require.NoError(t, err)
		require.Equal(t, granted[n].Load(), 1_000_000-d.Remaining)
		require.GreaterOrEqual(t, leased[n].Load(), int64(100))
	}
}
