package queues

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// A nodeQueue is a queue for Node.js, and how many jobs it has that are not done.
type nodeQueue struct{ name, waiting string }

var nodeQueues = []nodeQueue{
	{"pg-boss", "select count(*)::text from pgboss.job where state <> 'completed'"},
	{"graphile-worker", "select count(*)::text from graphile_worker.jobs where attempts < max_attempts"},
}

// onNodeQueues runs a test with each queue, on a database that has the table of starts.
func onNodeQueues(t *testing.T, test func(t *testing.T, db *kit.TestDB, queue nodeQueue)) {
	pgtest.OncePerServer(t)
	t.Parallel()
	for _, queue := range nodeQueues {
		t.Run(queue.name, func(t *testing.T) {
			t.Parallel()
			db := kit.NewDB(t)
			db.Execute(`create table starts (kind text not null, n integer not null, key text not null, instant timestamptz not null,
				fetched timestamptz not null, at timestamptz not null default clock_timestamp())`)
			test(t, db, queue)
		})
	}
}

// drive runs docs/examples/queues/drive.mjs, which has the numbers of jobs, and returns the lines it prints.
func (q nodeQueue) drive(t *testing.T, db *kit.TestDB, subject string) ([]string, error) {
	t.Helper()
	node, err := findNode()
	if err != nil && !kit.Installs {
		t.Skipf("RATELIMIT_TEST_EXAMPLES=all installs Node.js 22.18 and the packages of docs/examples/queues: %v", err)
	}
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), kit.Patience)
	defer cancel()
	var stderr strings.Builder
	c := exec.CommandContext(ctx, node, "drive.mjs", q.name, subject)
	c.Dir, c.Stderr = "../../docs/examples/queues", &stderr
	c.Env = append(os.Environ(), kit.PgVariables(t, db.URL)...)
	out, err := c.Output()
	require.NoError(t, ctx.Err(), "not all jobs have started: %s", stderr.String())
	if err != nil {
		err = fmt.Errorf("%w\n%s", err, stderr.String())
	}
	return strings.Fields(string(out)), err
}

// requireNoneLeft fails if a job is not done, or was done twice.
func (q nodeQueue) requireNoneLeft(t *testing.T, db *kit.TestDB) {
	require.Equal(t, []string{"0"}, kit.Column(t, db.DB, q.waiting))
	require.Empty(t, kit.Column(t, db.DB, "select kind || ' ' || n from starts group by kind, n having count(*) > 1"))
}

// Jobs that were reserved start when their token is there, or later. So by any time no more jobs have started than the bucket allows. Jobs that
// the queue's timer finds late may start together, with reservations or without: how many in a second is printed, and not bounded.
func TestNode_ReservedJobsAreNotEarly(t *testing.T) {
	onNodeQueues(t, func(t *testing.T, db *kit.TestDB, queue nodeQueue) {
		const capacity, refill = 10, 100
		db.DefinePolicy("calls", capacity, refill, time.Second)
		begin := kit.One[time.Time](t, db.Pool, "select clock_timestamp()")
		require.NoError(t, kit.ErrorOf(queue.drive(t, db, "reserve")))
		queue.requireNoneLeft(t, db)

		starts := times(t, db, "select at from starts where kind = 'reserved' order by 1")
		require.Len(t, starts, 1000)
		for i, at := range starts {
			require.LessOrEqual(t, int64(i+1)*1_000_000, capacity*1_000_000+at.Sub(begin).Microseconds()*refill, "start %d", i+1)
		}
		require.Equal(t, []string{"0"}, kit.Column(t, db.DB, "select count(*)::text from starts where at < instant or fetched < instant"))
		for _, kind := range []string{"reserved", "alone"} {
			t.Logf("%s, %s: late by %s", queue.name, kind, strings.Join(kit.Column(t, db.DB, `
				select format('%s ms (median), %s ms (99th percentile); at most %s starts in a second', round(1000 * percentile_cont(0.5) within group (order by late)),
				              round(1000 * percentile_cont(0.99) within group (order by late)), max(within))
				  from (select extract(epoch from at - instant)::float8 as late,
				               count(*) over (order by at range between current row and interval '1 second' following) as within
				          from starts where kind = $1) as s`, kind), ""))
		}
	})
}

// A worker that asks before it works starts no more jobs of a key than its bucket allows, in any window: those that were fetched
// after its begin, and recorded before its end, were granted within.
func TestNode_TheWorkerAsks(t *testing.T) {
	onNodeQueues(t, func(t *testing.T, db *kit.TestDB, queue nodeQueue) {
		const capacity, refill = 5, 10
		db.DefinePolicy("calls", 1000, 1000, time.Second)
		db.Execute("select ratelimit_override('calls', 'slow', capacity => $1, refill => $2, every => '1 second')", capacity, refill)
		require.NoError(t, kit.ErrorOf(queue.drive(t, db, "work")))
		queue.requireNoneLeft(t, db)
		require.Equal(t, []string{"b 60", "c 60", "slow 60"}, kit.Column(t, db.DB, "select key || ' ' || count(*) from starts group by key order by 1"))

		begins := times(t, db, "select fetched from starts where key = 'slow' order by n")
		ends := times(t, db, "select at from starts where key = 'slow' order by n")
		for _, begin := range begins {
			for _, end := range ends {
				within := 0
				for i := range begins {
					if !begins[i].Before(begin) && !ends[i].After(end) {
						within++
					}
				}
				if within > 0 {
					require.LessOrEqual(t, within, capacity+int(refill*end.Sub(begin)/time.Second), "starts within %v", end.Sub(begin))
				}
			}
		}
		require.Equal(t, []string{"180"}, kit.Column(t, db.DB, "select count(*)::text from ratelimit.idempotency_keys"), "each job is charged once")
	})
}

func TestNode_ARolledBackEnqueueGivesTheTokensBack(t *testing.T) {
	onNodeQueues(t, func(t *testing.T, db *kit.TestDB, queue nodeQueue) {
		db.DefinePolicy("calls", 1, 1, kit.ADay)
		ids := kit.NoError(queue.drive(t, db, "rollback"))(t)
		require.Len(t, ids, 1)
		require.NotEqual(t, "null", ids[0], "there was a job")
		require.Equal(t, []string{"0"}, kit.Column(t, db.DB, queue.waiting))
		require.Equal(t, int64(1), db.Must(kit.Peek(db.Pool, "calls", "k", 1)).Remaining)
	})
}

func TestNode_ADeniedEnqueueInsertsNothing(t *testing.T) {
	onNodeQueues(t, func(t *testing.T, db *kit.TestDB, queue nodeQueue) {
		db.DefinePolicy("calls", 1, 1, kit.ADay)
		ids := kit.NoError(queue.drive(t, db, "deny"))(t)
		require.Len(t, ids, 2)
		require.NotEqual(t, "null", ids[0])
		require.Equal(t, "null", ids[1])
		require.Equal(t, []string{"1"}, kit.Column(t, db.DB, queue.waiting))
	})
}

// pg-boss completes every job of a batch when its handler returns: the handler of one job must refuse the others, or they are lost.
func TestNode_ABatchIsRefused(t *testing.T) {
	pgtest.OncePerServer(t)
	db := kit.ParallelDB(t)
	db.DefinePolicy("calls", 5, 5, time.Second)
	require.ErrorContains(t, kit.ErrorOf(nodeQueues[0].drive(t, db, "batch")), "its batchSize must be 1")
	require.Equal(t, int64(5), db.Must(kit.Peek(db.Pool, "calls", "k", 1)).Remaining)
}

// A worker that is killed after the grant, or while it puts a job off, loses no job, does none twice, and charges once.
func TestNode_AKilledWorkerLosesNoJob(t *testing.T) {
	for _, when := range []string{"granted", "denied"} {
		t.Run(when, func(t *testing.T) {
			onNodeQueues(t, func(t *testing.T, db *kit.TestDB, queue nodeQueue) {
				db.DefinePolicy("calls", 2, 1, kit.ADay)
				if when == "denied" {
					db.Acquire("calls", "k", 2)
				}
				_, err := queue.drive(t, db, "die "+when)
				require.ErrorContains(t, err, "signal: killed")
				require.Empty(t, kit.Column(t, db.DB, "select key from starts"))
				if when == "denied" {
					db.Reset("calls", "k")
				}
				require.NoError(t, kit.ErrorOf(queue.drive(t, db, "recover")))
				queue.requireNoneLeft(t, db)
				require.Equal(t, []string{"1"}, kit.Column(t, db.DB, "select count(*)::text from starts"))
				require.Equal(t, int64(1), db.Must(kit.Peek(db.Pool, "calls", "k", 1)).Remaining)
			})
		})
	}
}

// The page shows lines of the files, in their order.
func TestNode_ThePageShowsTheFiles(t *testing.T) {
	t.Parallel()
	page := string(kit.NoError(os.ReadFile("../../docs/queues.md"))(t))
	for _, queue := range nodeQueues {
		code := string(kit.NoError(os.ReadFile("../../docs/examples/queues/" + queue.name + ".mjs"))(t))
		_, section, found := strings.Cut(page, "\n## "+queue.name+"\n")
		require.True(t, found, queue.name)
		_, block, found := strings.Cut(section, "```text\n")
		require.True(t, found, queue.name)
		block, _, _ = strings.Cut(block, "```\n")
		for line := range strings.Lines(block) {
			_, code, found = strings.Cut(code, line)
			require.True(t, found, "%s.mjs: %s", queue.name, line)
		}
	}
}

func times(t testing.TB, db *kit.TestDB, sql string, args ...any) []time.Time {
	rows := kit.NoError(db.Pool.Query(context.Background(), sql, args...))(t)
	return kit.NoError(pgx.CollectRows(rows, pgx.RowTo[time.Time]))(t)
}

// findNode finds a Node.js that the queues run on, and their packages. Where RATELIMIT_TEST_EXAMPLES is "all", they are installed.
var findNode = sync.OnceValues(func() (string, error) {
	if err := kit.Npm("docs/examples/queues/node_modules"); err != nil {
		return "", err
	}
	installed, err := filepath.Abs("../../build/node-22/bin/node")
	if err != nil {
		return "", err
	}
	candidates := []string{"node", installed}
	works := func(node string) bool {
		const probe = `const [major, minor] = process.versions.node.split('.'); process.exit(major > 22 || major == 22 && minor >= 18 ? 0 : 1)`
		return exec.Command(node, "--eval", probe).Run() == nil
	}
	if i := slices.IndexFunc(candidates, works); i >= 0 {
		return candidates[i], nil
	}
	if !kit.Installs {
		return "", errors.New("no Node.js 22.18 or later")
	}
	return installed, kit.Npm("build/node-22")
})
