package main

import (
	"math"
	"runtime"
	"slices"
)

// A measure is one figure of the report: a metric, or the ratio of two from the same round.
type measure struct {
	name, unit string
	quick      bool
	asked      bool // measured only if -only names it
	over       metric
	under      metric // the zero metric: over stands alone
	needs      metric // what else scale looks at
	scale      func(value float64, r round) float64
	goal       *goal
}

// A goal is what a measure must reach and what it should.
type goal struct {
	floor, aim float64
	most       bool // less is better
}

func (g goal) met(value, bound float64) bool {
	if g.most {
		return value <= bound
	}
	return value >= bound
}

func (m measure) metrics() []metric {
	return slices.DeleteFunc([]metric{m.over, m.under, m.needs}, func(m metric) bool { return m == metric{} })
}

// values returns what each round gave.
func (m measure) values(rounds []round) []float64 {
	values := make([]float64, len(rounds))
	for i, round := range rounds {
		values[i] = round.value(m.over)
		if m.under != (metric{}) {
			values[i] /= round.value(m.under)
		}
		if m.scale != nil {
			values[i] = m.scale(values[i], round)
		}
	}
	return values
}

func median(values []float64) float64 {
	sorted := slices.Sorted(slices.Values(values))
	n := len(sorted)
	if n == 0 {
		return math.NaN()
	}
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

func experiments(l *lab, o options) []experiment {
	// The first is the one that may lack its program.
	return []experiment{&instructions{}, &bare{l}, &grid{lab: l}, &calls{lab: l}, &served{lab: l}, &leases{lab: l}, &processes{lab: l}, &versions{lab: l}, &npm{lab: l}, &overload{lab: l}, &snapshot{lab: l, hold: o.hold}, &cleanup{lab: l}, &buckets{l}, &shardsCost{lab: l}}
}

// all returns every measure: what must be shown, then the figures of each cell.
func all() []measure {
	measures := mustShow()
	core := map[string]bool{}
	for _, m := range measures {
		for _, metric := range m.metrics() {
			core[metric.cell] = core[metric.cell] || m.quick
		}
	}
	add := func(unit string, over metric) {
		measures = append(measures, measure{name: over.cell + "/" + over.name, unit: unit, quick: core[over.cell], over: over})
	}
	for _, cell := range slices.Concat((&grid{}).cells(), (&calls{}).cells(), leasesCells, processesCells, (&versions{}).cells(), (&npm{}).cells()) {
		add("1/s", metric{cell, rate})
		for _, name := range []string{p50, p95, p99, cpuServer, cpuClient} {
			add("µs", metric{cell, name})
		}
	}
	for _, way := range servedWays {
		for _, callers := range servedCallers {
			cell := servedName(way, callers)
			add("1/s", metric{cell, rate})
			for _, name := range []string{p50, p99, cpuServer, cpuProgram, cpuClient} {
				add("µs", metric{cell, name})
			}
		}
	}
	for _, way := range []string{"grpc", "json"} {
		cell := overloadName(way)
		for _, name := range []string{best, offered, rate} {
			add("1/s", metric{cell, name})
		}
		for _, name := range []string{late, refused} {
			add("ratio", metric{cell, name})
		}
		add("µs", metric{cell, p99})
	}
	for _, cell := range slices.Concat((&bare{}).cells(), (&buckets{}).cells()) {
		if cell != "bare/wal" {
			add("1/s", metric{cell, rate})
			add("µs", metric{cell, cpuServer})
		}
	}
	for _, name := range []string{"before", "after"} {
		add("1/s", metric{"snapshot", name})
	}
	for _, name := range []string{best, offered, rate} {
		add("1/s", metric{"overload/3x", name})
		if name != offered {
			add("1/s", metric{"overload/frozen", name})
		}
	}
	for _, name := range []string{refused, late, "told", "refused_after"} {
		add("ratio", metric{"overload/3x", name})
	}
	for _, name := range []string{refused, late, "cpu", "sessions"} {
		add("", metric{"overload/frozen", name})
	}
	for _, name := range []string{"without", "with", "removed"} {
		add("1/s", metric{"cleanup", name})
	}
	for _, cell := range (&instructions{}).cells() {
		measures = append(measures, measure{name: cell, unit: "a decision", over: metric{cell, "instructions"}})
	}
	measures = append(measures, shardsMeasures()...)
	return append(measures, capacityFormula()...)
}

// mustShow returns the measures with a goal.
func mustShow() []measure {
	const quick = true
	noflush := func(keys string, callers int) metric {
		return metric{cellName("combined-noflush", keys, callers), rate}
	}
	flushed := func(keys string, callers int) metric { return metric{cellName("combined-flush", keys, callers), rate} }
	redis := func(keys string, callers int) metric { return metric{cellName("redis", keys, callers), rate} }
	joint := func(opponent string, callers int) metric {
		return metric{cellName("joint-"+opponent, "uniform", callers), rate}
	}
	latency := func(opponent string, callers int, name string) metric {
		return metric{cellName(opponent, "uniform", callers), name}
	}
	lease := func(cell, name string) metric { return metric{"leases/" + cell, name} }
	least := func(floor, aim float64) *goal { return &goal{floor, aim, false} }
	most := func(floor, aim float64) *goal { return &goal{floor, aim, true} }
	ratio := func(name string, quick bool, over, under metric, goal *goal) measure {
		return measure{name: name, unit: "ratio", quick: quick, over: over, under: under, goal: goal}
	}
	return []measure{
		ratio("acquire_to_bare_update", quick, metric{"bare/acquire", rate}, metric{"bare/update", rate}, least(0.5, 0.7)),
		ratio("denied_to_bare_select", quick, metric{"bare/denied", rate}, metric{"bare/select", rate}, least(0.4, 0.6)),
		ratio("reserved_to_acquire", !quick, metric{"bare/reserved", rate}, metric{"bare/acquire", rate}, nil),
		ratio("enforced_to_acquire", !quick, metric{"bare/enforced", rate}, metric{"bare/acquire", rate}, nil),
		ratio("settled_to_keyed", !quick, metric{"bare/settled", rate}, metric{"bare/keyed", rate}, nil),
		ratio("guarded_to_insert", !quick, metric{"bare/guarded", rate}, metric{"bare/insert", rate}, nil),
		{name: "wal_per_denial", unit: "bytes", quick: quick, over: metric{"bare/wal", "bytes"}, goal: most(0, 0)},
		ratio("keyed_to_unkeyed", quick, metric{"bare/keyed", rate}, metric{"bare/acquire", rate}, least(0.6, 0.75)),
		ratio("combined_16_many_keys_to_redis", quick, noflush("uniform", 16), redis("uniform", 16), least(0.7, 1)),
		ratio("combined_64_many_keys_to_redis", quick, noflush("uniform", 64), redis("uniform", 64), least(1.4, 1.5)),
		ratio("combined_256_many_keys_to_redis", quick, noflush("uniform", 256), redis("uniform", 256), least(2.2, 2.5)),
		ratio("combined_256_many_keys_flushed_to_redis", quick, flushed("uniform", 256), redis("uniform", 256), least(1, 2)),
		ratio("combined_256_hot_key_to_redis", quick, noflush("hot", 256), redis("hot", 256), least(3, 6)),
		ratio("combined_256_hot_key_flushed_to_redis", quick, flushed("hot", 256), redis("hot", 256), least(2, 4)),
		ratio("combined_64_p99_to_redis", quick, latency("combined-noflush", 64, p99), latency("redis", 64, p99), most(0.8, 0.6)),
		ratio("joint_64_to_redis", quick, joint("combined-noflush", 64), joint("redis", 64), least(1, 1.5)),
		ratio("joint_256_to_redis", quick, joint("combined-noflush", 256), joint("redis", 256), least(1.5, 2)),
		ratio("joint_64_to_script", quick, joint("combined-noflush", 64), joint("script", 64), nil),
		ratio("joint_256_to_script", quick, joint("combined-noflush", 256), joint("script", 256), nil),
		ratio("keyed_combined_64_to_unkeyed", !quick, metric{cellName("keyed-combined-noflush", "uniform", 64), rate}, noflush("uniform", 64), nil),
		ratio("keyed_combined_256_to_unkeyed", !quick, metric{cellName("keyed-combined-noflush", "uniform", 256), rate}, noflush("uniform", 256), nil),
		ratio("served_grpc_64_p99_to_combiner", !quick, metric{servedName("grpc", 64), p99}, metric{servedName("combiner", 64), p99}, most(2, 1.5)),
		ratio("served_health_64_p99_to_combiner", !quick, metric{servedName("health", 64), p99}, metric{servedName("combiner", 64), p99}, nil),
		ratio("served_grpc_64_to_redis", !quick, metric{servedName("grpc", 64), rate}, metric{servedName("redis", 64), rate}, nil),
		ratio("served_grpc_256_to_redis", !quick, metric{servedName("grpc", 256), rate}, metric{servedName("redis", 256), rate}, nil),
		ratio("served_json_256_to_redis", !quick, metric{servedName("json", 256), rate}, metric{servedName("redis", 256), rate}, nil),
		ratio("served_grpc_64_to_envoy", !quick, metric{servedName("grpc", 64), rate}, metric{servedName("envoy", 64), rate}, nil),
		ratio("served_grpc_256_to_envoy", !quick, metric{servedName("grpc", 256), rate}, metric{servedName("envoy", 256), rate}, nil),
		ratio("node_64_to_rate_limiter_flexible", !quick, metric{cellName("npm/pgratelimit", "uniform", 64), rate},
			metric{cellName("npm/rate-limiter-flexible", "uniform", 64), rate}, nil),
		ratio("node_64_hot_key_to_rate_limiter_flexible", !quick, metric{cellName("npm/pgratelimit", "hot", 64), rate},
			metric{cellName("npm/rate-limiter-flexible", "hot", 64), rate}, nil),
		ratio("served_grpc_overload_to_best", !quick, metric{overloadName("grpc"), rate}, metric{overloadName("grpc"), best}, least(0.8, 0.9)),
		ratio("served_json_overload_to_best", !quick, metric{overloadName("json"), rate}, metric{overloadName("json"), best}, least(0.8, 0.9)),
		ratio("lease_64_hot_key_to_redis", quick, lease("leaser/hot", rate), lease("redis/hot", rate), least(20, 40)),
		{name: "lease_64_hot_key_p50", unit: "µs", quick: quick, over: lease("leaser/hot", p50), goal: most(2, 1)},
		ratio("lease_64_hot_key_1ms_to_redis", quick, lease("leaser-1ms/hot", rate), lease("redis-1ms/hot", rate), least(20, 40)),
		{name: "lease_64_hot_key_1ms_p50", unit: "µs", quick: quick, over: lease("leaser-1ms/hot", p50), goal: most(2, 1)},
		{name: "lease_64_hot_key_1ms_p99", unit: "µs", quick: quick, over: lease("leaser-1ms/hot", p99), goal: most(1000, 100)},
		ratio("lease_64_1000_zipfian_keys_to_redis", quick, lease("leaser/zipf-1000", rate), lease("redis/zipf-1000", rate), least(3, 6)),
		ratio("lease_64_many_keys_to_combined", quick, lease("leaser/uniform", rate), lease("combined/uniform", rate), least(0.95, 1)),
		ratio("lease_64_hot_key_5ms_to_redis", !quick, lease("leaser-5ms/hot", rate), lease("redis-5ms/hot", rate), nil),
		ratio("combined_64_many_keys_1ms_to_redis", !quick, lease("combined-1ms/uniform", rate), lease("redis-1ms/uniform", rate), nil),
		ratio("combined_64_many_keys_5ms_to_redis", !quick, lease("combined-5ms/uniform", rate), lease("redis-5ms/uniform", rate), nil),
		ratio("processes_hot_key_to_redis", !quick, metric{"processes/combined", rate}, metric{"processes/redis", rate}, nil),
		ratio("processes_hot_key_leased_to_redis", !quick, metric{"processes/leaser", rate}, metric{"processes/redis", rate}, nil),
		ratio("combined_64_postgresql_18_to_15", !quick, metric{versionsName("18", "combined"), rate}, metric{versionsName("15", "combined"), rate}, nil),
		ratio("plain_64_postgresql_18_to_15", !quick, metric{versionsName("18", "plain"), rate}, metric{versionsName("15", "plain"), rate}, nil),
		ratio("overload_goodput_to_best", !quick, metric{"overload/3x", rate}, metric{"overload/3x", best}, least(0.9, 0.95)),
		{name: "overload_told_in_time", unit: "of the refused", over: metric{"overload/3x", "told"}, goal: least(0.99, 1)},
		{name: "overload_refused_afterwards", unit: "of the callers", over: metric{"overload/3x", "refused_after"}, goal: most(0.01, 0)},
		ratio("frozen_goodput_to_load", !quick, metric{"overload/frozen", rate}, metric{"overload/frozen", best}, least(0.9, 0.99)),
		ratio("combined_alone_to_plain", quick, latency("combined-noflush", 1, p50), latency("plain-noflush", 1, p50), most(1.1, 1)),
		ratio("hot_acquire_to_bare_update", quick, metric{"bare/hot-acquire", rate}, metric{"bare/hot-update", rate}, least(0.5, 0.7)),
		ratio("buckets_10m_to_10k", !quick, metric{"buckets/10m", rate}, metric{"buckets/10k", rate}, least(0.7, 0.9)),
		ratio("buckets_1m_to_10k", !quick, metric{"buckets/1m", rate}, metric{"buckets/10k", rate}, nil),
		ratio("hot_key_under_snapshot", !quick, metric{"snapshot", "after"}, metric{"snapshot", "before"}, least(0.5, 0.8)),
		ratio("acquire_beside_cleanup", !quick, metric{"cleanup", "with"}, metric{"cleanup", "without"}, least(0.7, 0.9)),
	}
}

// capacityFormula returns what the formula of docs/performance.md is made of, and measured ÷ formula.
//
//	decisions per second = cores × 10⁶ ÷ CPU microseconds per decision
//	bytes                = buckets × (183 + 3 × bytes of key)
//	                     + remembered × (150 + 2.5 × bytes of key and idempotency key)
//
// The microseconds are those of the server, and of the client when they share the machine. What 64
// callers cost foretells the rate of 256; combining beats that, because fuller calls cost less.
func capacityFormula() []measure {
	measures := []measure{
		{name: "bucket_bytes", unit: "bytes", over: metric{"buckets/1m", "bytes"}},
		{name: "bucket_bytes_to_formula", unit: "ratio", over: metric{"buckets/1m", "bytes"},
			scale: func(bytes float64, r round) float64 { return bytes / (183 + 3*r["buckets/1m"]["text"]) }},
		{name: "remembered_bytes", unit: "bytes", quick: true, over: metric{"bare/keyed", "bytes"}},
		{name: "remembered_bytes_to_formula", unit: "ratio", quick: true, over: metric{"bare/keyed", "bytes"},
			scale: func(bytes float64, r round) float64 { return bytes / (150 + 2.5*r["bare/keyed"]["text"]) }},
	}
	for _, opponent := range []string{"plain-noflush", "combined-noflush"} {
		cost := cellName(opponent, "uniform", 64)
		measures = append(measures, measure{name: opponent + "_rate_to_formula", unit: "ratio",
			over: metric{cellName(opponent, "uniform", 256), rate}, needs: metric{cost, rate},
			scale: func(perSecond float64, r round) float64 {
				return perSecond * (r[cost][cpuServer] + r[cost][cpuClient]) / (1e6 * float64(runtime.NumCPU()))
			}})
	}
	return measures
}
