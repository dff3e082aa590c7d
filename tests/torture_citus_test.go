package tests

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// The fuzzer of TestTorture_Fuzz, through each node of a Citus cluster: the answers are those of the model, and no node crashes.
func TestTorture_Citus(t *testing.T) {
	c := newCitus(t)
	db := c.create(t, "fuzzed")
	db.stopClock()
	var fuzzers []*fuzzer
	inputs := newTally()
	for _, node := range db {
		f := &fuzzer{
			db: node, inputs: inputs, citus: true,
			setClock: "update public.test_clock set now = timestamptz 'epoch' + %d * interval '1 microsecond'",
		}
		f.begin(t)
		fuzzers = append(fuzzers, f)
	}
	if seed, given := testSeed(t); given {
		fuzzers[0].seeds = append(fuzzers[0].seeds, seed)
	}
	run := torture(t, 10*time.Second)
	rounds := 0
	for ; rounds < len(db) || run.goesOn(); rounds++ {
		f := fuzzers[rounds%len(db)]
		seed := f.seed()
		require.NoError(t, f.round(seed), "RATELIMIT_TEST_SEED=%d, through node %d", seed, rounds%len(db))
		run.progress("%d inputs", inputs.total())
	}
	for n, node := range db {
		var restarts int
		require.NoError(t, node.Pool.QueryRow(t.Context(),
			"select count(*) from pg_stat_activity where backend_type = 'checkpointer' and backend_start > pg_postmaster_start_time() + interval '10 seconds'").Scan(&restarts))
		require.Zero(t, restarts, "node %d: a crash starts the checkpointer anew", n)
	}
	run.figure("rounds", rounds, "")
	inputs.report(run)
}
