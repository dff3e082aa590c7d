package client_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

// shards are databases that are numbered, and the pools that lead there.
type shards struct {
	dbs   []*pgtest.DB
	pools []*pgxpool.Pool
}

func newShards(t *testing.T, of int) (s shards) {
	for n := range of {
		db := pgtest.New(t)
		db.Exec(t, "select ratelimit_define_shard($1, $2)", n, of)
		s.dbs, s.pools = append(s.dbs, db), append(s.pools, db.Pool)
	}
	return s
}

func (s shards) open(t *testing.T) *client.Sharded {
	limiter := kit.NoError(client.NewSharded(t.Context(), s.pools))(t)
	t.Cleanup(limiter.Close)
	return limiter
}

// shardIs requires that an error is one of a shard.
func shardIs(t *testing.T, shard, of int, err error) {
	var e *client.ShardError
	require.ErrorAs(t, err, &e)
	require.Equal(t, [2]int{shard, of}, [2]int{e.Shard, e.Of}, "%v", err)
	require.ErrorContains(t, err, fmt.Sprintf("pgratelimit: shard %d of %d: ", shard, of))
}

// Each call about a key finds the bucket in the database that ShardOf names, and no other.
func TestSharded_EachCallGoesToTheShardOfItsKey(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	ctx := t.Context()
	const of = 4
	s := newShards(t, of)
	limiter := s.open(t)
	for _, policy := range []string{"api", "org"} {
		require.NoError(t, limiter.DefinePolicy(ctx, client.Policy{Name: policy, Capacity: 100, Refill: 1, Every: time.Hour}))
	}
	for shard := range of {
		key := kit.KeyOf(shard, of, "user:")
		require.True(t, kit.NoError(limiter.Acquire(ctx, "api", key, client.Cost(10)))(t).Allowed)
		charges := []client.Charge{{Policy: "api", Key: key, Cost: client.Cost(5)}, {Policy: "org", Key: key}}
		require.True(t, kit.NoError(limiter.AcquireAll(ctx, charges))(t).Allowed)
		require.EqualValues(t, 65, kit.NoError(limiter.On(key).Charge(ctx, "api", key, 20))(t).Remaining)
		require.NoError(t, limiter.Each(func(n int, on *client.Prefetcher) error {
			left := map[bool]int64{true: 65, false: 100}[n == shard]
			require.Equal(t, left, kit.NoError(on.Peek(ctx, "api", key))(t).Remaining, "shard %d, key of shard %d", n, shard)
			require.Equal(t, left, kit.NoError(client.New(s.pools[n]).Peek(ctx, "api", key))(t).Remaining)
			return nil
		}))
	}
}

func TestSharded_DefinitionsAreMadeOnAllShards(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	ctx := t.Context()
	s := newShards(t, 4)
	limiter := s.open(t)
	policy := client.Policy{Name: "api", Capacity: 10, Refill: 1, Every: time.Hour}
	require.ErrorIs(t, limiter.DropPolicy(ctx, "api"), client.ErrUnknownPolicy)
	require.NoError(t, client.New(s.pools[2]).DefinePolicy(ctx, policy)) // a part of the shards, as after an error
	for range 2 {
		require.NoError(t, limiter.DefinePolicy(ctx, policy))
		for _, pool := range s.pools {
			require.Len(t, kit.NoError(client.New(pool).Policies(ctx))(t), 1)
		}
	}
	require.NoError(t, client.New(s.pools[3]).DropPolicy(ctx, "api"))
	require.NoError(t, limiter.DropPolicy(ctx, "api"), "what is left of it")
	require.ErrorIs(t, limiter.DropPolicy(ctx, "api"), client.ErrUnknownPolicy)

	s.dbs[1].Exec(t, "drop function ratelimit_define_policy")
	s.dbs[3].Exec(t, "drop function ratelimit_define_policy")
	err := limiter.DefinePolicy(ctx, policy)
	shardIs(t, 1, 4, err)
	require.ErrorContains(t, err, "shard 3 of 4: define policy: ")
}

func TestSharded_ChargesOfSeveralShardsAreRefused(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	ctx := t.Context()
	limiter := newShards(t, 2).open(t)
	require.NoError(t, limiter.DefinePolicy(ctx, client.Policy{Name: "api", Capacity: 10, Refill: 1, Every: time.Hour}))
	here, there := kit.KeyOf(0, 2, "user:"), kit.KeyOf(1, 2, "user:")
	_, err := limiter.AcquireAll(ctx, []client.Charge{{Policy: "api", Key: here}, {Policy: "api", Key: here}, {Policy: "api", Key: there}})
	require.ErrorIs(t, err, client.ErrSeveralShards)
	require.ErrorIs(t, err, client.ErrInvalidArgument)
	require.ErrorContains(t, err, "charge 0 to shard 0 and charge 2 to shard 1 of 2")
	require.ErrorContains(t, err, "the same key")
	require.NotContains(t, err.Error(), here, "who may not see keys may see errors")
	for _, key := range []string{here, there} {
		require.EqualValues(t, 10, kit.NoError(limiter.On(key).Peek(ctx, "api", key))(t).Remaining)
	}
	_, err = limiter.AcquireAll(ctx, nil)
	require.ErrorIs(t, err, client.ErrInvalidArgument)
	require.NotErrorIs(t, err, client.ErrSeveralShards)
	_, err = limiter.AcquireAll(ctx, []client.Charge{{Policy: "nobody", Key: there}, {Policy: "api", Key: there}})
	require.ErrorIs(t, err, client.ErrUnknownPolicy)
	shardIs(t, 1, 2, err)
}

// Each way to list the wrong databases is told from the others, with the database and what helps.
func TestNewSharded_RefusesWhatIsWrong(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	ctx := t.Context()
	const of = 4
	s := newShards(t, of)
	p := s.pools
	open := func(pools ...*pgxpool.Pool) error { _, err := client.NewSharded(ctx, pools); return err }
	s.open(t)

	unnumbered, other, bare := pgtest.New(t), pgtest.New(t), pgtest.Empty(t)
	other.Exec(t, "select ratelimit_define_shard(1, 8)")
	nowhere := connect(t, s.dbs[0], nil, func(config *pgx.ConnConfig) { config.Database = "nowhere" })
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
			require.Equal(t, slices.Contains(test.wrong, shard), strings.Contains(err.Error(), prefix), "%s: %v", name, err)
		}
	}
	for _, pools := range [][]*pgxpool.Pool{nil, p[:3]} {
		require.ErrorIs(t, open(pools...), client.ErrWrongShard)
		require.ErrorContains(t, open(pools...), "power of two")
	}
	err := open(p[0], p[1], nowhere, p[3])
	shardIs(t, 2, of, err)
	require.ErrorContains(t, err, "3D000")
	err = open(p[0], p[1], p[2], bare.Pool)
	shardIs(t, 3, of, err)
	require.ErrorContains(t, err, "Install pgratelimit in this database")
}

// A connection to the wrong database is refused, too, when it is made later.
func TestCheckShard_RefusesConnections(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	s := newShards(t, 2)
	connect := func(shard, of int) error {
		config := s.pools[1].Config()
		config.AfterConnect = client.CheckShard(shard, of, client.Schema("public"))
		pool := kit.NoError(pgxpool.NewWithConfig(t.Context(), config))(t)
		defer pool.Close()
		return pool.Ping(t.Context())
	}
	require.NoError(t, connect(1, 2))
	for _, wrong := range [][2]int{{0, 2}, {1, 4}} {
		err := connect(wrong[0], wrong[1])
		require.ErrorIs(t, err, client.ErrWrongShard)
		shardIs(t, wrong[0], wrong[1], err)
	}
	err := client.CheckAlone()(t.Context(), s.dbs[1].Connect(t))
	require.ErrorIs(t, err, client.ErrWrongShard)
	require.ErrorContains(t, err, "is shard 1 of 2: buckets of most keys are elsewhere, and would be full here. List all 2 databases")
	for _, db := range []*pgtest.DB{newShards(t, 1).dbs[0], pgtest.New(t)} {
		require.NoError(t, client.CheckAlone()(t.Context(), db.Connect(t)))
	}
}
