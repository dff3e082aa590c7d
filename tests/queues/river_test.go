// Package queues runs the recipes of docs/queues.md on the queues themselves.
package queues

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"
	"github.com/stretchr/testify/require"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// The two recipes. The page has the same text: see TestRiver_ThePageShowsTheCodeThatIsTested.

// enqueue inserts a job that starts when the customer has a token. If the answer is not Allowed, it has inserted nothing.
func enqueue(ctx context.Context, tx pgx.Tx, limiter *client.Limiter, queue *river.Client[pgx.Tx],
	customer, order string, job river.JobArgs) (client.Reservation, error) {
	r, err := limiter.WithTx(tx).Reserve(ctx, "partner", customer, time.Hour, client.IdempotencyKey(order))
	if err != nil || !r.Allowed || r.Replayed { // of a replay, the job is there: it was committed with the tokens
		return r, err
	}
	var opts river.InsertOpts
	if r.Wait > 0 { // by the clock of the server, which decides when a job is due
		err = tx.QueryRow(ctx, "select clock_timestamp() + $1::interval", r.Wait).Scan(&opts.ScheduledAt)
	}
	if err == nil {
		_, err = queue.InsertTx(ctx, tx, job, &opts)
	}
	return r, err
}

// A turn starts a job when its customer has a token, and snoozes it until then.
type turn struct {
	river.MiddlewareDefaults
	limiter  *client.Limiter
	customer func(*rivertype.JobRow) string
}

func (t *turn) Work(ctx context.Context, job *rivertype.JobRow, work func(context.Context) error) error {
	// The idempotency key names one run: a lost answer is asked for again, and nothing is charged twice. The number of the attempt
	// would not do: a job that snoozes itself runs again under the same number, and needs another token.
	run := fmt.Sprint(job.ID, " ", job.AttemptedAt.UnixMicro())
	d, err := t.limiter.Acquire(ctx, "partner", t.customer(job), client.IdempotencyKey(run))
	switch {
	case err != nil:
		return err
	case d.Never():
		return river.JobCancel(errors.New("the bucket will never have the token"))
	case !d.Allowed:
		return river.JobSnooze(d.RetryAfter)
	}
	return work(ctx)
}

func TestRiver_ThePageShowsTheCodeThatIsTested(t *testing.T) {
	t.Parallel()
	tested := string(kit.NoError(os.ReadFile("river_test.go"))(t))
	page := string(kit.NoError(os.ReadFile("../../docs/queues.md"))(t))
	_, section, found := strings.Cut(page, "\n## River\n")
	require.True(t, found)
	section, _, _ = strings.Cut(section, "\n## ")
	blocks := strings.Split(section, "```go\n")[1:]
	require.Len(t, blocks, 2)
	for _, block := range blocks {
		code, _, _ := strings.Cut(block, "```")
		require.Contains(t, tested, code)
	}
}

type partnerCall struct {
	Customer string `json:"customer"`
	Order    string `json:"order"`
}

func (partnerCall) Kind() string { return "partner_call" }

// newTurn is the middleware for jobs of partnerCall.
func newTurn(q *riverQueue) *turn {
	return &turn{limiter: client.New(q.Pool), customer: func(job *rivertype.JobRow) string {
		var call partnerCall
		require.NoError(q.T, json.Unmarshal(job.EncodedArgs, &call))
		return call.Customer
	}}
}

// River schedules this job, and no limiter is asked.
type plainCall struct {
	Order string `json:"order"`
}

func (plainCall) Kind() string { return "plain_call" }

const (
	capacity = 20 // of policy partner in TestRiver_AReservedJobIsNotEarly, and its refill in a second
	refill   = 200
)

// A job starts when its token is there, or later. So at no instant have more jobs started than the bucket has had tokens. A window
// that begins later may have more starts, because River starts together the jobs that were due since its last look.
func TestRiver_AReservedJobIsNotEarly(t *testing.T) {
	const jobs, enqueuers = 1_000, 4
	q := newQueue(t)
	q.Policy("partner", capacity, refill, kit.Second, kit.Remember(time.Hour))
	queue := q.start(100)
	begin := kit.One[time.Time](t, q.Pool, "select clock_timestamp()")
	kit.Crowd(t, enqueuers, func(n int) error {
		for i := n; i < jobs; i += enqueuers {
			order := fmt.Sprint("order ", i)
			if r, err := q.enqueue(queue, partnerCall{"limited", order}); err != nil || !r.Allowed {
				return fmt.Errorf("%s: %+v, %w", order, r, err)
			}
			var due time.Time
			err := q.Pool.QueryRow(t.Context(), "select scheduled_at from river_job where args ->> 'order' = $1 and state = 'scheduled'", order).Scan(&due)
			if err == nil { // for the instant of a job that waits, a job without the limiter
				_, err = queue.Insert(t.Context(), plainCall{order}, &river.InsertOpts{ScheduledAt: due})
			}
			if err != nil && !errors.Is(err, pgx.ErrNoRows) {
				return err
			}
		}
		return nil
	})
	q.awaitCompleted()

	require.Len(t, q.granted("limited"), jobs)
	started := q.started("partner_call", "limited")
	require.Len(t, started, jobs)
	require.Empty(t, kit.Column(t, q.DB, `
		select format('%s started at %s and has its token at %s', s.call, s.at, g.at)
		  from starts as s join granted as g on g.idempotency_key = s.call ->> 'order'
		 where s.kind = 'partner_call' and s.at < g.at`))
	for i, at := range started {
		require.LessOrEqual(t, int64(i+1)*1_000_000, capacity*1_000_000+at.Sub(begin).Microseconds()*refill, "start %d", i+1)
	}

	const lateness = `
		select coalesce(round(percentile_cont(0.5) within group (order by extract(epoch from s.at - g.at))::numeric, 2)::text, 'none')
		  from starts as s join granted as g on g.idempotency_key = s.call ->> 'order'
		 where s.kind = $1
		   and s.call ->> 'order' in (select p.call ->> 'order' from starts as p where p.kind = 'plain_call')`
	t.Logf("median lateness in seconds: %s with the limiter, %s without", kit.Column(t, q.DB, lateness, "partner_call")[0], kit.Column(t, q.DB, lateness, "plain_call")[0])
	t.Logf("most starts within a second: %d, where the bucket allows %d", q.Number(`
		select max(within)
		  from (select count(*) over (order by at range between current row and interval '1 second' following) as within
		          from starts where kind = 'partner_call') as s`), capacity+refill)
}

// A rollback gives the tokens back, a repeat inserts no other job, and a denial none.
func TestRiver_AnEnqueueIsOneJobAndItsTokens(t *testing.T) {
	q := newQueue(t)
	q.Policy("partner", 2, 1, kit.ADay)
	queue := q.client(&river.Config{})
	requireThere := func(jobs, tokens int64) {
		require.Equal(t, []int64{jobs, tokens}, []int64{q.jobs(), q.Left("partner", "limited")})
	}
	tx := kit.NoError(q.Pool.Begin(t.Context()))(t)
	r := kit.NoError(enqueue(t.Context(), tx, client.New(q.Pool), queue, "limited", "order", partnerCall{"limited", "order"}))(t)
	require.True(t, r.Allowed)
	require.EqualValues(t, 1, kit.One[int64](t, tx, "select count(*) from river_job"))
	require.NoError(t, tx.Rollback(t.Context()))
	requireThere(0, 2)

	for _, replayed := range []bool{false, true} {
		r = kit.NoError(q.enqueue(queue, partnerCall{"limited", "order"}))(t)
		require.True(t, r.Allowed && r.Replayed == replayed)
		requireThere(1, 1)
	}
	require.True(t, kit.NoError(q.enqueue(queue, partnerCall{"limited", "order 2"}))(t).Allowed)
	r = kit.NoError(q.enqueue(queue, partnerCall{"limited", "order 3"}))(t)
	require.False(t, r.Allowed)
	require.InDelta(t, kit.ADay, r.Wait, float64(time.Hour))
	requireThere(2, 0)
}

// The jobs of three customers are in one queue. Those of the limited customer are before the others, and are too many for its bucket.
func TestRiver_TheMiddlewareHoldsUpOneKey(t *testing.T) {
	const jobs, burst, perSecond = 40, 5, 5 // seven seconds
	q := newQueue(t)
	q.Policy("partner", 1_000, 1_000, kit.Second, kit.Remember(time.Hour))
	q.Execute("select ratelimit_override('partner', 'limited', $1, $2)", burst, perSecond)
	begin := kit.One[time.Time](t, q.Pool, "select clock_timestamp()")
	customers := []string{"limited", "free", "other"}
	for _, customer := range customers {
		for i := range jobs {
			kit.NoError(q.client(&river.Config{}).Insert(t.Context(), partnerCall{customer, fmt.Sprint("order ", i)}, nil))(t)
		}
	}
	q.snoozesItself = "order 7" // of each customer, after its first start
	q.start(10, newTurn(q))
	q.awaitCompleted()

	require.EqualValues(t, len(customers)*jobs, q.jobs())
	var last []time.Time
	for _, customer := range customers {
		started, granted := q.started("partner_call", customer), q.granted(customer)
		require.Len(t, started, jobs+1, customer)
		require.Len(t, granted, jobs+1, "%s: each start has a token of its own", customer)
		require.EqualValues(t, jobs, q.Number("select count(distinct call) from starts where call ->> 'customer' = $1", customer))
		last = append(last, slices.MaxFunc(started, time.Time.Compare))
	}
	for i, at := range q.started("partner_call", "limited") {
		require.LessOrEqual(t, int64(i+1)*1_000_000, burst*1_000_000+at.Sub(begin).Microseconds()*perSecond, "start %d", i+1)
	}
	require.True(t, last[1].Before(last[0]) && last[2].Before(last[0]), "held up: %v", last)
	t.Logf("%d snoozes of %d jobs", q.Number("select sum((metadata ->> 'snoozes')::bigint) from river_job where args ->> 'customer' = 'limited'"), jobs)
}

// A snooze takes a worker for a moment, and comes back soon: so a job waits behind the snoozing jobs that are due before it.
func TestRiver_ABacklogThatSnoozesDelaysOthers(t *testing.T) {
	const jobs = 500
	q := newQueue(t)
	q.Policy("partner", 5, 5, kit.Second, kit.Remember(time.Hour))
	queue := q.client(&river.Config{})
	backlog := make([]river.InsertManyParams, jobs)
	for i := range backlog {
		backlog[i].Args = partnerCall{"limited", fmt.Sprint("order ", i)}
	}
	kit.NoError(queue.InsertMany(t.Context(), backlog))(t)
	q.start(10, newTurn(q))
	q.Await(t, kit.Patience, "select not exists (select from river_job where attempted_at is null)")
	kit.NoError(queue.Insert(t.Context(), partnerCall{"other", "order"}, nil))(t)
	q.Await(t, kit.Patience, "select exists (select from starts where call ->> 'customer' = 'other')")
	t.Logf("the job of another customer waited for %d ms", q.Number(`
		select (extract(epoch from s.at - j.created_at) * 1000)::bigint
		  from starts as s, river_job as j where s.call ->> 'customer' = 'other' and j.args = s.call`))
}

// What River passes to a middleware, without waiting for River: a run that asks again, a retry after a crash, and a job that never has
// a token.
func TestRiver_TheMiddlewareChargesEachRunOnce(t *testing.T) {
	q := newQueue(t)
	q.Policy("partner", 2, 1, kit.ADay)
	q.Execute("select ratelimit_override('partner', 'blocked', 0, 0)")
	runs := 0
	run := func(customer string, attempt int) error {
		at := kit.T0.Add(time.Duration(attempt) * time.Hour)
		job := &rivertype.JobRow{ID: 1, Attempt: attempt, AttemptedAt: &at, EncodedArgs: fmt.Appendf(nil, `{"customer": %q}`, customer)}
		return newTurn(q).Work(t.Context(), job, func(context.Context) error { runs++; return nil })
	}
	require.NoError(t, run("limited", 1))
	require.NoError(t, run("limited", 1))
	require.EqualValues(t, 1, q.Left("partner", "limited"))
	require.NoError(t, run("limited", 2))
	require.EqualValues(t, 0, q.Left("partner", "limited"))
	require.Equal(t, 3, runs)
	var snooze *river.JobSnoozeError
	require.ErrorAs(t, run("limited", 3), &snooze)
	require.InDelta(t, kit.ADay, snooze.Duration, float64(time.Hour))
	var cancel *river.JobCancelError
	require.ErrorAs(t, run("blocked", 1), &cancel)
	require.Equal(t, 3, runs)
}

// A riverQueue is a database with River's tables and this package, whose worker enters each start in the table starts.
type riverQueue struct {
	*kit.TestDB
	snoozesItself string // the order whose job snoozes in its first run
}

// newQueue is for a test that runs beside others.
func newQueue(t *testing.T) *riverQueue {
	db := kit.ParallelDB(t)
	migrator := kit.NoError(rivermigrate.New(riverpgxv5.New(db.Pool), nil))(t)
	kit.NoError(migrator.Migrate(t.Context(), rivermigrate.DirectionUp, nil))(t)
	db.Execute("create table starts (kind text, call jsonb, at timestamptz default clock_timestamp())")
	// A grant is remembered for an hour after its wait.
	db.Execute("create view granted as select key, idempotency_key, expires_at - interval '1 hour' as at from ratelimit.idempotency_keys")
	return &riverQueue{TestDB: db}
}

// client inserts jobs, and works on none unless its configuration has workers.
func (q *riverQueue) client(config *river.Config) *river.Client[pgx.Tx] {
	return kit.NoError(river.NewClient(riverpgxv5.New(q.Pool), config))(q.T)
}

// start works on jobs until the test ends. The settings of River are its defaults.
func (q *riverQueue) start(workers int, middleware ...rivertype.Middleware) *river.Client[pgx.Tx] {
	config := &river.Config{
		Queues:     map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: workers}},
		Workers:    river.NewWorkers(),
		Middleware: middleware,
	}
	river.AddWorker(config.Workers, river.WorkFunc(func(ctx context.Context, job *river.Job[partnerCall]) error {
		starts, err := q.enter(ctx, job.JobRow)
		if err == nil && starts == 1 && job.Args.Order == q.snoozesItself {
			return river.JobSnooze(0)
		}
		return err
	}))
	river.AddWorker(config.Workers, river.WorkFunc(func(ctx context.Context, job *river.Job[plainCall]) error {
		return kit.ErrorOf(q.enter(ctx, job.JobRow))
	}))
	queue := q.client(config)
	require.NoError(q.T, queue.Start(context.Background()))
	q.T.Cleanup(func() { require.NoError(q.T, queue.Stop(context.Background())) })
	return queue
}

// enter enters a start, and returns how often the job has started.
func (q *riverQueue) enter(ctx context.Context, job *rivertype.JobRow) (starts int, err error) {
	err = q.Pool.QueryRow(ctx, `
		with entered as (insert into starts (kind, call) values ($1, $2) returning call)
		select 1 + (select count(*) from starts as s where s.kind = $1 and s.call = e.call) from entered as e`,
		job.Kind, job.EncodedArgs).Scan(&starts)
	return starts, err
}

// enqueue is the recipe in a transaction of its own.
func (q *riverQueue) enqueue(queue *river.Client[pgx.Tx], call partnerCall) (r client.Reservation, err error) {
	err = pgx.BeginFunc(context.Background(), q.Pool, func(tx pgx.Tx) error {
		r, err = enqueue(context.Background(), tx, client.New(q.Pool), queue, call.Customer, call.Order, call)
		return err
	})
	return r, err
}

func (q *riverQueue) jobs() int64 { return q.Number("select count(*) from river_job") }

func (q *riverQueue) awaitCompleted() {
	q.Await(q.T, kit.Patience, "select not exists (select from river_job where state <> 'completed')")
}

// started are the instants at which jobs of a customer started, and granted those at which their tokens were there, by the server's
// clock, in order.
func (q *riverQueue) started(kind, customer string) []time.Time {
	return times(q.T, q.TestDB, "select at from starts where kind = $1 and call ->> 'customer' = $2 order by at", kind, customer)
}

func (q *riverQueue) granted(customer string) []time.Time {
	return times(q.T, q.TestDB, "select at from granted where key = $1 order by at", customer)
}
