package citus

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// BenchmarkCitus measures the CPU time of the servers for a decision, on a cluster of two workers and two shards, compared with that on one
// PostgreSQL beside it: the ratios that docs/sharding.md quotes. make bench-citus runs it.
func BenchmarkCitus(b *testing.B) {
	const keys, rounds = 256, 5
	c := kit.NewCitus(b)
	db := c.CreateOn(b, "costs", len(c.Nodes))
	db.Coordinator().Execute("alter database costs set citus.shard_count = 1") // of usage; buckets have one more
	c.Install(b, "costs")
	alone := kit.CreateDB(b, pgtest.Private(b), "costs")
	for _, db := range []*kit.TestDB{alone, db.Coordinator()} {
		db.DefinePolicy("p", 1_000_000_000, 1_000_000, time.Second)
	}
	on := map[int][]string{} // keys by node
	var mixed []string
	for n := 0; len(on[1]) < keys || len(on[2]) < keys; n++ {
		node, _ := db.ShardOf(c, fmt.Sprint("k", n))
		on[node] = append(on[node], fmt.Sprint("k", n))
	}
	on[1], on[2] = on[1][:keys], on[2][:keys]
	for n := range keys / 2 {
		mixed = append(mixed, on[1][n], on[2][n])
	}
	routed := kit.NoError(client.NewCitus(b.Context(), db.Coordinator().Pool, func(_ context.Context, host string, _ int) (client.Pool, error) {
		n := 0
		for c.NodeName(n) != host {
			n++
		}
		return pgxpool.NewWithConfig(b.Context(), db[n].Pool.Config())
	}))(b)
	defer routed.Close()
	combiner := client.NewCombiner(alone.Pool)
	defer combiner.Close()

	var one, cluster []int // the postmasters
	for n, db := range append(db, alone) {
		pid := kit.One[int](b, db.Pool, `select split_part(pg_read_file('postmaster.pid'), E'\n', 1)::integer`)
		if n < len(c.Nodes) {
			cluster = append(cluster, pid)
		} else {
			one = append(one, pid)
		}
	}

	single := func(db *kit.TestDB, keys []string) func() int {
		return func() int {
			for n := range 6000 {
				kit.One[bool](b, db.Pool, "select allowed from ratelimit_acquire('p', $1)", keys[n%len(keys)])
			}
			return 6000
		}
	}
	batches := func(db *kit.TestDB, keys []string) func() int {
		policies := slices.Repeat([]string{"p"}, 64)
		return func() int {
			for n := range 400 {
				from := n * 64 % len(keys) / 64 * 64
				kit.One[int](b, db.Pool, "select cardinality(elements) from ratelimit_acquire_packed($1, $2)", policies, keys[from:from+64])
			}
			return 400 * 64
		}
	}
	shared := func(limiter client.Acquirer) func() int {
		return func() int {
			var callers sync.WaitGroup
			for caller := range 64 {
				callers.Go(func() {
					for n := range 300 {
						_, err := limiter.Acquire(b.Context(), "p", mixed[(caller+n*64)%len(mixed)])
						require.NoError(b, err)
					}
				})
			}
			callers.Wait()
			return 64 * 300
		}
	}
	for _, m := range []struct {
		name         string
		plain, citus func() int
	}{
		{"acquire, on the node of the key", single(alone, on[1]), single(db[1], on[1])},
		{"acquire, on another node", single(alone, on[1]), single(db[2], on[1])},
		{"64 keys, on the node of all", batches(alone, on[1]), batches(db[1], on[1])},
		{"64 keys, on the node of half", batches(alone, mixed), batches(db[1], mixed)},
		{"64 keys, on the coordinator", batches(alone, mixed), batches(db[0], mixed)},
		{"64 callers, client.Citus to client.Combiner", shared(combiner), shared(routed)},
	} {
		var ratios []float64
		for range rounds + 1 {
			ratios = append(ratios, perDecision(m.citus, cluster)/perDecision(m.plain, one))
		}
		ratios = ratios[1:] // the first connects and plans
		slices.Sort(ratios)
		fmt.Printf("%-45s %5.2f  (%.2f to %.2f)\n", m.name, ratios[rounds/2], ratios[0], ratios[rounds-1])
	}
	require.Equal(b, c.TLS, db[2].Number("select count(*) from pg_stat_ssl where ssl") > 0, "TLS between nodes")
}

// perDecision is the CPU time of servers for each of the decisions that do makes.
func perDecision(do func() int, postmasters []int) float64 {
	before := pgtest.CPUTime(postmasters...)
	decisions := do()
	return (pgtest.CPUTime(postmasters...) - before) / float64(decisions)
}
