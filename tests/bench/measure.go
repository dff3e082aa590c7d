package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// What is measured: each cell of the experiments by all metrics of its samples, and these ratios. A new measure is a new cell of an
// experiment, or a line of ratios, and a row in page.go that shows it.
func experiments(l *lab) []experiment {
	on := func() stage { return stage{lab: l} }
	return []experiment{
		&bare{on()}, &grid{stage: on()}, &served{stage: on()}, &prefetching{stage: on()}, &processes{stage: on()}, &npm{stage: on()},
		&python{npm{stage: on()}}, &snapshot{stage: on()}, &cleanup{stage: on()}, &buckets{on()}, &shardsCost{stage: on()}, &cores{stage: on()},
	}
}

// hasToBeAsked tells the cells that are measured only if -only names them: not every server has what shards take, and slots beside a
// snapshot take minutes.
func hasToBeAsked(cell string) bool {
	return strings.HasPrefix(cell, "shards/") || strings.HasPrefix(cell, "snapshot/")
}

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
	{"held_to_redis-hot", "held/hot/64/rate", "held-redis/hot/64/rate"},
	{"held_under_snapshot", "snapshot/held/after", "snapshot/held/before"},
	{"held_under_snapshot-hot", "snapshot/held-hot/after", "snapshot/held-hot/before"},
	{"held_pgbench_under_snapshot", "snapshot/pgbench/after", "snapshot/pgbench/before"},
	{"held_pgbench_under_snapshot-hot", "snapshot/pgbench-hot/after", "snapshot/pgbench-hot/before"},
	{"shards_client_plain_to_one", "shards/client/plain/cpu_server", "shards/one/plain/cpu_server"},
	{"shards_client_combined_to_one", "shards/client/combined/cpu_server", "shards/one/combined/cpu_server"},
	{"shards_citus_plain_to_one", "shards/citus/plain/cpu_server", "shards/one/plain/cpu_server"},
	{"shards_citus_combined_to_one", "shards/citus/combined/cpu_server", "shards/one/combined/cpu_server"},
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
func choose(only string, experiments []experiment) (cells []string, chosen []ratio, err error) {
	named := map[string]bool{}
	for _, e := range experiments {
		cells = append(cells, e.cells()...)
	}
	for pattern := range strings.SplitSeq(only, ",") {
		matches := regexp.MustCompile("^" + strings.ReplaceAll(regexp.QuoteMeta(strings.TrimSpace(pattern)), `\*`, ".*") + "$").MatchString
		known := false
		choose := func(cells ...string) {
			known = true
			for _, cell := range cells {
				named[cell] = true
			}
		}
		for _, cell := range cells {
			if matches(cell) || only == "" && !hasToBeAsked(cell) {
				choose(cell)
			}
		}
		for _, r := range ratios {
			if matches(r.name) {
				choose(r.cells()...)
			}
		}
		if !known {
			return nil, nil, fmt.Errorf("no cell and no ratio is called %q: see -list", pattern)
		}
	}
	cells = slices.DeleteFunc(cells, func(cell string) bool { return !named[cell] })
	for _, r := range ratios {
		if of := r.cells(); named[of[0]] && named[of[1]] {
			chosen = append(chosen, r)
		}
	}
	return cells, chosen, nil
}
