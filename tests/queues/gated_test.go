package queues

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// A gated is a database with the table of jobs and the fetch of docs/queues.md.
type gated struct {
	*kit.TestDB
	putBack string // the statement of the page that puts back the jobs of dead workers
}

func newGated(t testing.TB) *gated {
	page := string(kit.NoError(os.ReadFile("../../docs/queues.md"))(t))
	_, section, found := strings.Cut(page, "\n## A table of jobs\n")
	require.True(t, found)
	blocks := regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(section, -1)
	require.Len(t, blocks, 2)
	g := &gated{kit.NewDB(t), blocks[1][1]}
	for statement := range strings.SplitSeq(blocks[0][1], ";\n") {
		g.Execute(statement)
	}
	return g
}

// enqueue gives tenants first to last a number of jobs each.
func (g *gated) enqueue(first, last, jobs int) {
	g.Execute("insert into jobs (tenant) select 'tenant ' || n from generate_series(1, $3) as i, generate_series($1::integer, $2) as n", first, last, jobs)
}

// limit gives tenants first to last one token, and one a second.
func (g *gated) limit(first, last int) {
	g.Execute("select ratelimit_override('tenant', 'tenant ' || n, capacity => 1, refill => 1) from generate_series($1::integer, $2) as n", first, last)
}

// A fetched is a row of the answer.
type fetched struct {
	Tenant     string
	RetryAfter *time.Duration
	ID         *int64
}

type fetcher func(q kit.Querier, after string, skip []string, tenants, each int) ([]fetched, error)

func fetch(q kit.Querier, after string, skip []string, tenants, each int) ([]fetched, error) {
	return fetchedBy(q, "fetch_jobs($1, $2, $3, $4)", after, skip, tenants, each)
}

func fetchedBy(q kit.Querier, call string, args ...any) ([]fetched, error) {
	rows, err := q.Query(context.Background(), "select tenant, retry_after, id from "+call, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[fetched])
}

// work fetches with four workers as the page says, until as many jobs as are wanted have started; another tenant's job counts nothing.
func (g *gated) work(fetch fetcher, wanted int64, counts func(tenant string) bool) {
	var started atomic.Int64
	var limited sync.Map // denied tenants, and until when
	kit.Crowd(g.T, 4, func(int) error {
		for after, idle := "", true; started.Load() < wanted; {
			skip := []string{}
			for tenant, until := range limited.Range {
				if time.Now().Before(until.(time.Time)) {
					skip = append(skip, tenant.(string))
				}
			}
			answer, err := fetch(g.Pool, after, skip, 20, 5)
			if err != nil {
				return err
			}
			after = ""
			for _, row := range answer {
				switch after = row.Tenant; {
				case row.ID == nil:
					limited.Store(row.Tenant, time.Now().Add(*row.RetryAfter))
				default:
					idle = false
					if counts(row.Tenant) {
						started.Add(1)
					}
				}
			}
			if after == "" {
				if idle {
					time.Sleep(20 * time.Millisecond)
				}
				idle = true
			}
		}
		return nil
	})
}

// A start has the instant of its decision: refilled_at of the bucket, which its transaction has charged. By these instants, no window has
// more starts than the bucket allows.
func TestGated_EachTenantKeepsItsLimit(t *testing.T) {
	t.Parallel()
	const tenants, limited, jobs, capacity, refill = 200, 20, 10_000, 10, 100
	g := newGated(t)
	g.DefinePolicy("tenant", capacity, refill, time.Second)
	g.limit(1, limited)
	g.enqueue(1, limited, 5)
	g.enqueue(limited+1, tenants, 55)
	g.Execute("create table starts (id bigint primary key, tenant text not null, decided timestamptz not null, at timestamptz not null)")
	g.Execute(`create function record() returns trigger language plpgsql as $$ begin
		insert into starts values (new.id, new.tenant, (select b.refilled_at from ratelimit.buckets as b where b.key = new.tenant), new.started_at);
		return new; end $$`)
	g.Execute("create trigger record before update on jobs for each row execute function record()")
	g.work(fetch, jobs, func(string) bool { return true })

	require.EqualValues(t, jobs, g.Number("select count(*) from starts where at >= decided"))
	for n := 1; n <= tenants; n++ {
		at := times(t, g.TestDB, fmt.Sprintf("select decided from starts where tenant = 'tenant %d' order by 1", n))
		holds, gains := int64(capacity), int64(refill)
		if n <= limited {
			holds, gains = 1, 1
		}
		for i := range at {
			for j := i; j < len(at); j++ {
				within := at[j].Sub(at[i])
				require.LessOrEqual(t, int64(j-i+1)*1_000_000, holds*1_000_000+within.Microseconds()*gains, "tenant %d: starts %d to %d, within %v", n, i, j, within)
			}
		}
	}
}

func TestGated_AKilledWorkerLosesNothing(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"before the claim", "before the commit", "after the commit"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			g := newGated(t)
			g.DefinePolicy("tenant", 3, 1, kit.ADay)
			g.enqueue(1, 5, 4)
			requireEach := func(state string) {
				require.Equal(t, slices.Repeat([]string{state}, 5), kit.Column(t, g.DB, `
					select format('%s tokens, %s of %s jobs wait', (ratelimit_peek('tenant', tenant)).remaining, count(*) filter (where started_at is null), count(*))
					  from jobs group by tenant`))
			}
			keeper, worker := g.Session(), g.Session()
			if when == "before the claim" {
				keeper.Execute("select pg_advisory_lock(1)")
				g.Execute("create function wait() returns trigger language plpgsql as 'begin perform pg_advisory_xact_lock_shared(1); return new; end'")
				g.Execute("create trigger wait before update on jobs for each row execute function wait()")
			}
			if when != "after the commit" {
				worker.Execute("begin")
			}
			fetching := worker.Start(func(kit.Querier) (kit.Decision, error) {
				return kit.Decision{}, kit.ErrorOf(fetch(worker, "", []string{}, 10, 10))
			})
			if when == "before the claim" {
				fetching.BlockedBy(keeper)
			} else {
				require.NoError(t, kit.ErrorOf(fetching.Result()))
			}
			if when != "after the commit" {
				require.Equal(t, "55P03", kit.SQLState(kit.ErrorOf(kit.Acquire(g.Hasty(), "tenant", "tenant 5", 1))), "the fetch has taken tokens")
			}
			require.True(t, kit.One[bool](t, g.Pool, "select pg_terminate_backend($1, 60000)", worker.PgConn().PID()))
			<-fetching.Done
			keeper.Execute("select pg_advisory_unlock_all()")
			if when == "after the commit" {
				g.Execute(g.putBack)
				requireEach("0 tokens, 1 of 4 jobs wait")
				g.Execute("update jobs set started_at = started_at - interval '5 minutes'")
				g.Execute(g.putBack)
				requireEach("0 tokens, 4 of 4 jobs wait")
				g.Execute("select ratelimit_reset('tenant', tenant) from (select distinct tenant from jobs) as t")
			}
			requireEach("3 tokens, 4 of 4 jobs wait")
			require.Len(t, kit.NoError(fetch(g.Pool, "", []string{}, 10, 10))(t), 15)
			requireEach("0 tokens, 1 of 4 jobs wait")
		})
	}
}

func TestGated_AFetchSkipsWhatOthersHave(t *testing.T) {
	t.Parallel()
	g := newGated(t)
	g.DefinePolicy("tenant", 3, 1, kit.ADay)
	g.enqueue(1, 4, 2)
	require.Equal(t, "23514", kit.SQLState(kit.ErrorOf(g.Pool.Exec(t.Context(), "insert into jobs (tenant) values (repeat('x', 513))"))), "no key")
	g.Acquire("tenant", "tenant 1", 3)
	other, canceller, worker := g.Begin(), g.Begin(), g.Hasty()
	require.Len(t, kit.NoError(fetch(other, "tenant 1", []string{}, 1, 5))(t), 2)
	canceller.Execute("delete from jobs where id = (select min(id) from jobs where tenant = 'tenant 3')")

	worker.Execute("begin")
	answer := kit.NoError(fetch(worker, "", []string{"tenant 4"}, 10, 5))(t)
	var tenants []string
	for _, row := range answer {
		tenants = append(tenants, fmt.Sprintf("%.8s %t", row.Tenant, row.ID != nil))
	}
	require.Equal(t, []string{"tenant 1 false", "tenant 3 true"}, tenants, "the other worker has tenant 2")
	require.InDelta(t, kit.ADay, *answer[0].RetryAfter, float64(time.Minute))
	require.EqualValues(t, 2, g.Number("select count(*) from (select from jobs where tenant = 'tenant 1' for update nowait) as j"), "its jobs are not locked")
	require.Len(t, kit.NoError(fetch(g.Hasty(), "tenant 3", []string{}, 1, 5))(t), 2, "a tenant that is skipped is free for the other workers")
	worker.Execute("commit")
	require.EqualValues(t, 2, g.Left("tenant", "tenant 3"), "the token of the deleted job is given back")
}

// BenchmarkGated prints how many jobs a second start of 180 tenants whose buckets are full, alone and beside 20 tenants that are limited to
// one a second, of 50 jobs each: with the fetch of the page, and apart, with a gate that commits before the claim.
//
//	go test ./tests/queues -run '^$' -bench Gated -benchtime 11x
func BenchmarkGated(b *testing.B) {
	const free, limited, jobs = 180, 20, 50
	g := newGated(b)
	g.DefinePolicy("tenant", 1_000_000, 1_000_000, time.Second)
	g.limit(free+1, free+limited)
	source := kit.One[string](b, g.Pool, "select prosrc from pg_proc where proname = 'fetch_jobs'")
	gate, claim, _ := strings.Cut(source, "), claimed as (")
	g.Execute("create type gate as (tenant text, taken bigint, retry_after interval)")
	g.Execute("create function gate_tenants(after text, skip text[], tenants integer, each integer) returns setof gate language plpgsql as $$" + gate +
		") select tenant, taken, retry_after from gate; end $$")
	g.Execute(`create function claim_jobs(gates gate[]) returns table (tenant text, retry_after interval, id bigint, payload jsonb)
		language plpgsql as $$ #variable_conflict use_column
		begin return query with gate as (select * from unnest(gates)), claimed as (` + claim + "$$")
	apart := func(_ kit.Querier, after string, skip []string, tenants, each int) ([]fetched, error) {
		gates := kit.One[*string](b, g.Pool, "select array_agg(g)::text from gate_tenants($1, $2, $3, $4) as g", after, skip, tenants, each)
		return fetchedBy(g.Pool, "claim_jobs($1::text::gate[])", gates)
	}
	var rates [4][]float64 // together alone, apart alone, together beside the limited tenants, apart beside them
	for round := range b.N {
		for i := range rates {
			arm := (i + round) % len(rates)
			g.Execute("truncate jobs")
			g.Execute("delete from ratelimit.buckets")
			g.enqueue(1, free+arm/2*limited, jobs)
			g.Execute("vacuum analyze jobs, ratelimit.buckets")
			begin := time.Now()
			g.work([]fetcher{fetch, apart}[arm%2], free*jobs, func(tenant string) bool {
				return kit.NoError(strconv.Atoi(strings.TrimPrefix(tenant, "tenant ")))(b) <= free
			})
			rates[arm] = append(rates[arm], free*jobs/time.Since(begin).Seconds())
		}
	}
	median := func(over, under []float64) float64 {
		for i := range under {
			over[i] /= under[i]
		}
		return slices.Sorted(slices.Values(over))[len(over)/2]
	}
	b.ReportMetric(median(slices.Clone(rates[2]), rates[0]), "limited÷alone")
	b.ReportMetric(median(slices.Clone(rates[3]), rates[1]), "apart:limited÷alone")
	b.ReportMetric(median(rates[1], rates[0]), "apart÷together")
	b.ReportMetric(median(rates[0], nil), "jobs/s")
}
