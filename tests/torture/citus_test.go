package torture

import (
	"testing"

	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// The fuzzer of TestTorture_Fuzz, through each node of a Citus cluster: the answers are those of the model, and no node crashes.
func TestTorture_Citus(t *testing.T) {
	pgtest.OncePerServer(t)
	c := kit.NewCitus(t)
	db := c.Create(t, "fuzzed")
	db.StopClock()
	var fuzzers []*fuzzer
	inputs := newTally()
	for _, node := range db {
		f := &fuzzer{
			db: node, inputs: inputs, citus: true,
			setClock: "update public.test_clock set now = timestamptz 'epoch' + %d * interval '1 microsecond'",
		}
		f.Begin(t)
		fuzzers = append(fuzzers, f)
	}
	run, seed := kit.Torture(t, 6), kit.FirstSeed(t)
	rounds := 0
	for ; run.GoesOn(); rounds++ {
		require.NoError(t, fuzzers[rounds%len(db)].round(seed), "through node %d\n%s", rounds%len(db), kit.Repeats(t, seed))
		seed++
		run.Progress("%d inputs", inputs.total())
	}
	for n, node := range db {
		var restarts int
		require.NoError(t, node.Pool.QueryRow(t.Context(),
			"select count(*) from pg_stat_activity where backend_type = 'checkpointer' and backend_start > pg_postmaster_start_time() + interval '10 seconds'").Scan(&restarts))
		require.Zero(t, restarts, "node %d: a crash starts the checkpointer anew", n)
	}
	run.Figure("rounds", rounds, "")
	inputs.report(run)
}
