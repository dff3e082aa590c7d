package main

import (
	"context"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/pgratelimit/pgratelimit/client"
)

// What is measured: each cell of the experiments by all metrics of its samples, and the ratios. A new measure is a new cell, or a
// line of ratios, and a row in page.go that shows it. The opponents of a list take turns in its order: those that are compared
// follow each other.
var experiments = []experiment{
	{bareCells, openBare},
	{slices.Concat(
		cellsOf(contenders, []string{"uniform"}, 1, 64, 256),
		cellsOf(contenders, []string{"hot"}, 64),
		cellsOf([]string{"combined-noflush", "redis", "combined-flush", "redis-aof", "plain-noflush"}, []string{"uniform"}, 16),
		cellsOf([]string{"combined-noflush", "redis", "combined-flush"}, []string{"hot"}, 256),
		cellsOf([]string{"joint-combined-noflush", "joint-script", "joint-script-pipelined"}, []string{"uniform"}, 64, 256),
		cellsOf(deniedContenders, []string{"uniform"}, 64, 256),
		cellsOf(deniedContenders, []string{"hot"}, 256),
		cellsOf([]string{"held", "held-redis"}, keyNames, 64),                // lend slots, to fewer callers than there are slots
		cellsOf([]string{"keyed-combined-noflush"}, []string{"uniform"}, 64), // Redis' limiters know no idempotency key
	), openGrid},
	{cellsOf([]string{"served/grpc", "served/many", "served/stream", "served/json", "served/envoy"}, []string{"uniform"}, 64, 256), openServed},
	{slices.Concat(
		cellsOf([]string{"prefetch/prefetcher", "prefetch/redis", "prefetch/combined", "prefetch/prefetcher-1ms", "prefetch/redis-1ms", "prefetch/combined-1ms"}, []string{"hot"}, 64),
		cellsOf([]string{"prefetch/prefetcher", "prefetch/combined", "prefetch/combined-1ms", "prefetch/redis-1ms", "prefetch/redis-pipelined-1ms"}, []string{"uniform"}, 64),
	), openPrefetch},
	{cellsOf([]string{"processes/combined", "processes/redis", "processes/prefetcher", "processes/plain"}, []string{"hot"}, 64), openElsewhere},
	{cellsOf([]string{"npm/plain", "npm/combined", "npm/rate-limiter-flexible"}, keyNames, 64, 256), openElsewhere},
	{cellsOf([]string{"python/plain", "python/combined"}, keyNames, 64, 256), openElsewhere},
	{[]string{"snapshot", "snapshot/held", "snapshot/held-hot", "snapshot/pgbench", "snapshot/pgbench-hot"}, openSnapshot},
	{[]string{"cleanup"}, openCleanup},
	{bucketCells, openBuckets},
}

var contenders = []string{
	"combined-noflush", "redis", "combined-flush", "redis-pipelined", "redis-aof", "redis-aof-pipelined", "plain-noflush", "plain-flush", "statements",
}

// deniedContenders are denied a half of their requests, or 99 of 100 in a flood. A cached one remembers denials.
var deniedContenders = []string{"half-combined", "half-redis", "half-cached", "flood-combined", "flood-redis", "flood-cached"}

// A ratio is of two metrics from the same round. A metric is named cell/name.
type ratio struct{ name, over, under string }

var ratios = []ratio{
	{"acquire_to_bare_update", "bare/acquire/rate", "bare/update/rate"},
	{"denied_to_bare_select", "bare/denied/rate", "bare/select/rate"},
	{"keyed_to_unkeyed", "bare/keyed/rate", "bare/acquire/rate"},
	{"settled_to_keyed", "bare/settled/rate", "bare/keyed/rate"},
	{"guarded_to_insert", "bare/guarded/rate", "bare/insert/rate"},
	{"combined_16_many_keys_to_redis", "combined-noflush/uniform/16/rate", "redis/uniform/16/rate"},
	{"combined_64_many_keys_to_redis", "combined-noflush/uniform/64/rate", "redis/uniform/64/rate"},
	{"combined_64_p99_to_redis", "combined-noflush/uniform/64/p99", "redis/uniform/64/p99"},
	{"combined_256_many_keys_to_redis", "combined-noflush/uniform/256/rate", "redis/uniform/256/rate"},
	{"combined_256_many_keys_flushed_to_redis", "combined-flush/uniform/256/rate", "redis/uniform/256/rate"},
	{"combined_256_hot_key_to_redis", "combined-noflush/hot/256/rate", "redis/hot/256/rate"},
	{"combined_256_hot_key_flushed_to_redis", "combined-flush/hot/256/rate", "redis/hot/256/rate"},
	{"keyed_combined_64_to_unkeyed", "keyed-combined-noflush/uniform/64/rate", "combined-noflush/uniform/64/rate"},
	{"buckets_10m_to_10k", "buckets/10m/rate", "buckets/10k/rate"},
	{"acquire_beside_cleanup", "cleanup/with", "cleanup/without"},
	{"hot_key_under_snapshot", "snapshot/after", "snapshot/before"},
	{"held_to_keyed", "bare/held/rate", "bare/keyed/rate"},
	{"held_to_keyed-hot", "bare/held-hot/rate", "bare/keyed-hot/rate"},
	{"held_to_redis", "held/uniform/64/rate", "held-redis/uniform/64/rate"},
	{"node_plain_to_flexible", "npm/plain/uniform/64/rate", "npm/rate-limiter-flexible/uniform/64/rate"},
	{"held_to_redis-hot", "held/hot/64/rate", "held-redis/hot/64/rate"},
	{"held_under_snapshot", "snapshot/held/after", "snapshot/held/before"},
	{"held_under_snapshot-hot", "snapshot/held-hot/after", "snapshot/held-hot/before"},
	{"held_pgbench_under_snapshot", "snapshot/pgbench/after", "snapshot/pgbench/before"},
	{"held_pgbench_under_snapshot-hot", "snapshot/pgbench-hot/after", "snapshot/pgbench-hot/before"},
}

// cells are the two that a ratio needs.
func (r ratio) cells() []string {
	over, _ := splitMetric(r.over)
	under, _ := splitMetric(r.under)
	return []string{over, under}
}

func splitMetric(metric string) (cell, name string) {
	slash := strings.LastIndexByte(metric, '/')
	return metric[:max(0, slash)], metric[slash+1:]
}

// choose returns the cells that patterns name, and the ratios of cells that are measured. A pattern that names a ratio names its
// cells. In a pattern * stands for anything. Without patterns all is chosen but what has to be asked for.
func choose(only string) (cells []string, chosen []ratio, err error) {
	var all, named []string
	for _, e := range experiments {
		all = append(all, e.cells...)
	}
	if only == "" {
		isLong := func(cell string) bool { return strings.HasPrefix(cell, "snapshot/") } // slots beside a snapshot take minutes
		named = slices.DeleteFunc(slices.Clone(all), isLong)
	} else {
		for pattern := range strings.SplitSeq(only, ",") {
			matches := regexp.MustCompile("^" + strings.ReplaceAll(regexp.QuoteMeta(strings.TrimSpace(pattern)), `\*`, ".*") + "$").MatchString
			before := len(named)
			named = append(named, slices.DeleteFunc(slices.Clone(all), func(cell string) bool { return !matches(cell) })...)
			for _, r := range ratios {
				if matches(r.name) {
					named = append(named, r.cells()...)
				}
			}
			if len(named) == before {
				return nil, nil, fmt.Errorf("no cell and no ratio is called %q", pattern)
			}
		}
	}
	isNamed := func(cell string) bool { return slices.Contains(named, cell) }
	for _, r := range ratios {
		if of := r.cells(); isNamed(of[0]) && isNamed(of[1]) {
			chosen = append(chosen, r)
		}
	}
	return slices.DeleteFunc(all, func(cell string) bool { return !isNamed(cell) }), chosen, nil
}

// openGrid has every opponent with every keyspace and number of callers, and those for joint requests with many users.
func openGrid(ctx context.Context, s *stage, cells []string) measure {
	all, members, keys := map[string]opponent{}, newMembership(), keyspaces()
	setUp := slices.Concat(definePolicies(), defineJointPolicies(), defineSlots(), defineDry(manyKeys),
		[]string{fmt.Sprintf("select ratelimit_acquire('dry', '%s')", hotKey), limiterTable, fillLimiter(), "vacuum analyze"})
	pg := s.database(ctx, "grid", setUp...)
	add := func(name string, acquire acquirer) { all[name] = opponent{acquire: acquire, server: []int{pg.pid}} }
	for _, mode := range []struct {
		name        string
		flush       bool
		connections int32
	}{{"noflush", false, connections}, {"flush", true, connectionsFlushed}} {
		pool := s.pool(ctx, pg.URL("grid"), mode.flush, mode.connections)
		combiner := s.combiner(pool)
		add("plain-"+mode.name, pgratelimit(client.New(pool)))
		add("combined-"+mode.name, pgratelimit(combiner))
		if mode.flush {
			continue
		}
		add("joint-combined-noflush", members.pgratelimit(combiner))
		add("keyed-combined-noflush", keyed(combiner))
		add("held", held(client.New(pool)))
		add("statements", statements(pool))
		cached := s.combiner(pool, client.DenialCache())
		for name, share := range map[string]int{"half": 50, "flood": 99} {
			add(name+"-combined", mixed(share, dry(combiner), pgratelimit(combiner)))
			all[name+"-cached"] = opponent{ // as in an attack that goes on, whatever was measured before
				acquire: mixed(share, dry(cached), pgratelimit(cached)), server: []int{pg.pid}, before: dry(cached),
			}
		}
	}

	for name, flushed := range map[string]bool{"redis": false, "redis-aof": true} {
		if !slices.ContainsFunc(cells, func(cell string) bool { return strings.Contains(cell, "redis-aof") == flushed }) {
			continue
		}
		server := s.redisServer(ctx, flushed)
		pipelined := must(server.AutoPipeline())
		add := func(name string, acquire acquirer, fill ...*keyspace) {
			all[name] = opponent{acquire: acquire, server: []int{server.pid}}
			for _, keys := range fill {
				check(keys.askForAll(ctx, acquire))
			}
		}
		add(name, redisRate(server))
		add(name+"-pipelined", redisRate(pipelined), keys["hot"], keys["uniform"])
		if !flushed {
			add("joint-script", members.script(server))
			add("joint-script-pipelined", members.script(pipelined), keys["uniform"])
			add("held-redis", heldRedis(server))
			check(keys["uniform"].askForAll(ctx, emptyRedis(server)))
			check(keys["hot"].askForAll(ctx, emptyRedis(server)))
			add("half-redis", mixed(50, dryRedis(server), redisRate(server)))
			add("flood-redis", mixed(99, dryRedis(server), redisRate(server)))
		}
	}
	return loads(ctx, s.window, cells, all)
}

// openPrefetch compares a prefetching client with redis_rate and a combining one, near their servers and a millisecond away.
func openPrefetch(ctx context.Context, s *stage, cells []string) measure {
	const database = "prefetch"
	server := s.redisServer(ctx, false)
	pg := s.database(ctx, database, definePrefetchedPolicies()...)
	all := map[string]opponent{}
	for name, dial := range map[string]func(context.Context, string, string) (net.Conn, error){"": nil, "-1ms": latency(time.Millisecond).dial} {
		options := *server.Options()
		if dial != nil {
			options.Dialer = dial
		}
		rdb := redis.NewClient(&options)
		s.atEnd(rdb.Close)
		pipelined := must(rdb.AutoPipeline())
		pool := s.pool(ctx, pg.URL(database), false, connections, func(config *pgxpool.Config) {
			if dial != nil {
				config.ConnConfig.DialFunc = dial
			}
		})
		prefetcher := client.NewPrefetcher(pool, client.Prefetch{Policy: "durable"})
		s.atEnd(func() error { prefetcher.Close(); return nil })
		all["prefetch/redis"+name] = opponent{acquire: redisRate(rdb), server: []int{server.pid}}
		all["prefetch/redis-pipelined"+name] = opponent{acquire: redisRate(pipelined), server: []int{server.pid}}
		all["prefetch/combined"+name] = opponent{acquire: pgratelimit(s.combiner(pool)), server: []int{pg.pid}}
		all["prefetch/prefetcher"+name] = opponent{acquire: pgratelimit(prefetcher), server: []int{pg.pid}}
	}
	return loads(ctx, 2*s.window, cells, all)
}

// definePrefetchedPolicies defines policies with a larger bucket of the hot key: prefetched tokens answer millions of requests a second for it.
func definePrefetchedPolicies() []string {
	return append(definePolicies(),
		fmt.Sprintf("select ratelimit_define_policy('durable', %d, %d, '1 hour')", 100*capacity/3, 100*refillPerHour/3),
		fmt.Sprintf("select ratelimit_reset('durable', '%s')", hotKey), "vacuum analyze")
}

// openCleanup measures plain acquires of 64 callers without and with a clean-up beside them that has a million rows to remove.
func openCleanup(ctx context.Context, s *stage, _ []string) measure {
	const database, rows = "cleanup", 1_000_000
	pg := s.database(ctx, database, append(definePolicies(), "select ratelimit_define_policy('idle', 10, 10, '1 second')", "vacuum analyze")...)
	pool := s.pool(ctx, pg.URL(database), false, connections)
	l := load{64, keyspaces()["uniform"], opponent{acquire: pgratelimit(client.New(pool)), server: []int{pg.pid}}}
	return func(ctx context.Context, _ string) (sample, error) {
		check(pg.exec(ctx, database, fill{policy: "idle", count: rows, ago: "2 hours"}.sql()))
		without := must(l.run(ctx, 2*s.window))
		with := must(l.during(ctx, 0, func(ctx context.Context) error {
			return pg.exec(ctx, database, "call ratelimit_cleanup_all('2 minutes')")
		}))
		left := queryRow[int](ctx, pg, database, "select count(*) from ratelimit.buckets where due_at < now()")
		if left == rows {
			return nil, fmt.Errorf("clean-up removed nothing")
		}
		return sample{"without": without[rate], "with": with[rate]},
			pg.exec(ctx, database, "delete from ratelimit.buckets where due_at < now()", "vacuum ratelimit.buckets")
	}
}

// openSnapshot measures what a session that holds a snapshot costs: no dead version of a row can be removed meanwhile. Cell snapshot is
// combined acquires of 64 callers on one key, before, and after it was held for a while. The others are cycles of slots, for as long
// without it and beside it: by 64 callers in Go, or by pgbench.
func openSnapshot(ctx context.Context, s *stage, _ []string) measure {
	const database = "snapshot"
	pg := s.database(ctx, database, slices.Concat(definePolicies(), defineSlots(), []string{"vacuum analyze"})...)
	pool := s.pool(ctx, pg.URL(database), false, connections)
	combined, cycle := opponent{acquire: pgratelimit(s.combiner(pool))}, opponent{acquire: held(client.New(pool))}
	wait := func(d time.Duration) func(context.Context) error {
		return func(ctx context.Context) error { return pause(ctx, d) }
	}
	return func(ctx context.Context, cell string) (sample, error) {
		keys := keyspaces()["uniform"]
		if cell == "snapshot" || strings.HasSuffix(cell, "-hot") {
			keys = keyspaces()["hot"]
		}
		without := func() sample { return must(load{64, keys, cycle}.during(ctx, s.window, wait(s.snapshotHeld))) }
		beside := without
		if script, ok := strings.CutPrefix(cell, "snapshot/pgbench"); ok {
			without = func() sample {
				return pg.pgbench(ctx, database, bareScripts["bare/held"+script], s.snapshotHeld/2)
			}
			beside = without
		}
		if cell == "snapshot" {
			without = func() sample { return must(load{64, keys, combined}.run(ctx, 2*s.window)) }
			beside = func() sample { return must(load{64, keys, combined}.during(ctx, s.snapshotHeld, wait(2*s.window))) }
		}

		vacuum := "vacuum ratelimit.buckets, ratelimit.slots, ratelimit.leases"
		check(pg.exec(ctx, database, vacuum))
		before := without()
		check(pg.exec(ctx, database, vacuum))
		holder := must(pgx.Connect(ctx, pg.URL(database)))
		defer holder.Close(ctx)
		must(holder.Exec(ctx, "begin isolation level repeatable read; select 1 from ratelimit.policies"))
		return sample{"before": before[rate], "after": beside()[rate]}, nil
	}
}
