package tests

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/model"
)

// Clients call everything there is on few buckets at once, by clocks that disagree and jump. Their calls
// can be put in an order, within the time that each took, in which the model gives each of them the answer
// it got, in every field, by a clock reading it took.
func TestTorture_Linearizability(t *testing.T) {
	run := torture(t, 5*time.Second)
	c := newChronicler(newDB(t), "continuous durable", "stepped durable", "continuous ephemeral", "stepped ephemeral")
	var n operationCounts
	c.write(run.goesOn, func(seed uint64, histories []history, err error) bool {
		if err != nil {
			t.Errorf("history %d: %v: %+v", seed, err, pgError(err))
		}
		n.buckets += len(histories)
		for _, h := range histories {
			n.count(h)
			switch violation, decided := h.check(); {
			case !decided:
				n.undecided++
			case violation != "":
				t.Errorf("history %d: %s", seed, violation)
			}
		}
		n.histories++
		run.progress("%d operations in %d histories, %d grants, %d denials, %d replays",
			n.operations, n.histories, n.grants, n.denials, n.replays)
		return !t.Failed()
	})

	for _, some := range []int{n.grants, n.denials, n.replays, n.batched, n.cleanups, c.changes} {
		require.NotZero(t, some, "%+v", n)
	}
	require.Less(t, 2*n.undecided, n.buckets, "%+v", n) // by the wall clock, and seldom with the machine to itself
	run.figure("histories", n.histories, "")
	run.figure("histories of a bucket", n.buckets, "")
	run.figure("of these with too many orders to try", n.undecided, "")
	run.figure("operations", n.operations, "")
	run.figure("grants", n.grants, "")
	run.figure("denials", n.denials, "")
	run.figure("replays", n.replays, "")
	run.figure("requests in batches", n.batched, "")
	run.figure("rolled back", n.undone, "")
	run.figure("buckets cleaned up beside them", n.cleanups, "")
	run.figure("changes of policies beside them", c.changes, "")
}

type operationCounts struct {
	histories, buckets, operations, grants, denials, replays, batched, undone, cleanups, undecided int
}

func (n *operationCounts) count(h history) {
	n.operations += len(h)
	for _, op := range h {
		if op.batch != 0 {
			n.batched++
		}
		if op.undone {
			n.undone++
		}
		switch {
		case op.kind == cleansUp:
			n.cleanups++
		case op.kind != acquires || op.answer.Decision == nil:
		case op.answer.Decision.Replayed:
			n.replays++
		case op.answer.Decision.Allowed:
			n.grants++
		default:
			n.denials++
		}
	}
}

// A bug planted in SQL is found within seconds.
func TestLinearizability_FindsPlantedBugs(t *testing.T) {
	t.Parallel()
	for name, bug := range map[string]struct {
		mutation
		function string
	}{
		"a grant by an unlocked read": {mutation{
			`(update buckets as b set level = [^;]*? and )refilled_level\(b.level, b.refilled_at(, [^)]*\) >= v_wanted)`,
			`$1 (select refilled_level(o.level, o.refilled_at$2 from buckets as o where o.policy_id = v_policy.id and o.key = v_key)`,
		}, "ratelimit_acquire"},
		"a clock that goes back": {mutation{`greatest\(refilled_at, now\)`, "now"}, "ratelimit.refilled_until"},
		"a concurrent repeat is charged again": {mutation{
			`(update buckets as b set level = b.level) \+ v_taken`, "$1",
		}, "ratelimit_acquire"},
		"a denial by the clock before the wait": {mutation{
			`v_now := clock\(\); ( -- the update may have waited [^;]* from buckets as b)`, "$1",
		}, "ratelimit_acquire"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			db := newDB(t)
			db.mutate(bug.mutation, bug.function)
			c := newChronicler(db, "continuous durable", "stepped durable")
			found, deadline := false, time.Now().Add(3*patience)
			c.write(func() bool { return time.Now().Before(deadline) }, func(_ uint64, histories []history, err error) bool {
				found = err != nil || slices.ContainsFunc(histories, func(h history) bool {
					violation, decided := h.check()
					return decided && violation != ""
				})
				return !found
			})
			require.True(t, found)
		})
	}
}

// A chronicler has clients make random calls, one history after the other.
type chronicler struct {
	db       *testDB
	policies []string
	clients  []*recorder
	combiner *client.Combiner
	readings readings // of the combiner's connections
	changes  int
}

// newChronicler defines the policies by what their names say, and has clocks tell what they read.
func newChronicler(db *testDB, policies ...string) *chronicler {
	db.t.Helper()
	db.exec(`
		create or replace function ratelimit.clock() returns timestamptz language plpgsql volatile as $$
		declare
		  v_ahead_us bigint := coalesce(nullif(current_setting('test.ahead_us', true), ''), '0');
		  v_now      timestamptz;
		begin
		  if random() < 0.05 then
		    v_ahead_us := (random() - 0.5) * 10 ^ (4.3 * random());
		    perform set_config('test.ahead_us', v_ahead_us::text, false);
		  end if;
		  v_now := clock_timestamp() + v_ahead_us * interval '1 microsecond';
		  raise notice '%', (extract(epoch from v_now) * 1000000)::bigint;
		  return v_now;
		end;
		$$`)
	db.cleanUpAtOnce() // a history is over within seconds
	c := &chronicler{db: db, policies: policies}
	for range 5 {
		c.clients = append(c.clients, newRecorder(db))
	}
	config, err := pgxpool.ParseConfig(db.URL)
	require.NoError(db.t, err)
	config.ConnConfig.OnNotice = c.readings.note
	pool, err := pgxpool.NewWithConfig(context.Background(), config)
	require.NoError(db.t, err)
	db.t.Cleanup(pool.Close)
	c.combiner = client.NewCombiner(pool)
	db.t.Cleanup(c.combiner.Close)
	return c
}

// readings are the readings of the clock that notices reported.
type readings struct {
	mu   sync.Mutex
	all  []time.Time
	when []time.Time // they came
}

func (r *readings) note(_ *pgconn.PgConn, notice *pgconn.Notice) {
	us, err := strconv.ParseInt(notice.Message, 10, 64)
	if err != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all = append(r.all, time.UnixMicro(us).UTC())
	r.when = append(r.when, time.Now())
}

// since returns those that came at an instant or later.
func (r *readings) since(start time.Time) []time.Time {
	r.mu.Lock()
	defer r.mu.Unlock()
	first, _ := slices.BinarySearchFunc(r.when, start, time.Time.Compare)
	return slices.Clone(r.all[first:])
}

func (r *readings) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.all, r.when = r.all[:0], r.when[:0]
}

// A recorder is a session that records the readings of its clock.
type recorder struct {
	*pgx.Conn
	readings readings
}

func newRecorder(db *testDB) *recorder {
	db.t.Helper()
	config, err := pgx.ParseConfig(db.URL)
	require.NoError(db.t, err)
	r := &recorder{}
	config.OnNotice = r.readings.note
	r.Conn, err = pgx.ConnectConfig(context.Background(), config)
	require.NoError(db.t, err)
	db.t.Cleanup(func() { r.Close(context.Background()) })
	return r
}

// write has histories checked beside the next ones, as long as both agree to go on.
func (c *chronicler) write(goesOn func() bool, check func(seed uint64, histories []history, err error) bool) {
	type written struct {
		seed      uint64
		histories []history
		err       error
	}
	var (
		unread  = make(chan written, 8)
		stop    = make(chan struct{})
		checker sync.WaitGroup
	)
	checker.Go(func() {
		stopped := false
		for w := range unread {
			if !stopped && !check(w.seed, w.histories, w.err) {
				stopped = true
				close(stop)
			}
		}
	})
	defer checker.Wait()
	defer close(unread)
	for seed, n := rand.Uint64(), 0; (n < 8 || goesOn()) && !c.db.t.Failed(); seed, n = seed+1, n+1 {
		histories, err := c.history(seed)
		select {
		case unread <- written{seed, histories, err}:
		case <-stop:
			return
		}
	}
}

// A chronicle is one history of all buckets while it is made.
type chronicle struct {
	*chronicler
	seed     uint64
	started  time.Time
	combined bool
	buckets  []model.BucketID
	versions map[string][]version // of policies

	mu         sync.Mutex
	operations []*operation
	batches    int
}

// A version of a policy may have been in force between two instants.
type version struct {
	model.Policy
	since, until time.Duration
}

func (c *chronicler) history(seed uint64) (histories []history, err error) {
	random := rand.New(rand.NewPCG(seed, 0))
	h := &chronicle{
		chronicler: c,
		seed:       seed,
		started:    time.Now(),
		combined:   random.IntN(4) == 0,
		versions:   map[string][]version{},
	}
	for i := range 2 + random.IntN(3) {
		h.buckets = append(h.buckets, model.BucketID{Policy: c.policies[random.IntN(len(c.policies))], Key: fmt.Sprint(seed, " ", i)})
	}
	for _, b := range h.buckets {
		if err := h.define(random, c.clients[0], b.Policy); err != nil {
			return nil, err
		}
	}
	var callers errgroup.Group
	for i, r := range c.clients {
		callers.Go(func() error {
			a := &actor{h, r, i, rand.New(rand.NewPCG(seed, uint64(i+1)))}
			for range 10 {
				if err := a.act(); err != nil {
					return err
				}
			}
			return nil
		})
		if h.combined {
			callers.Go(func() error {
				a := &actor{h, nil, len(c.clients) + i, rand.New(rand.NewPCG(seed, uint64(len(c.clients)+i+1)))}
				for range 5 {
					if err := a.acquireCombined(); err != nil {
						return err
					}
				}
				return nil
			})
		}
	}
	err = callers.Wait()
	c.readings.forget()
	for _, r := range c.clients {
		r.readings.forget()
	}
	return h.finish(), err
}

// finish adds to each operation what only a look at all of them tells.
func (h *chronicle) finish() (histories []history) {
	for _, b := range h.buckets {
		var of history
		granted := map[string][]*operation{}
		for _, op := range h.operations {
			if op.BucketID != b {
				continue
			}
			of = append(of, op)
			if op.granted() && !op.undone {
				granted[op.idempotencyKey] = append(granted[op.idempotencyKey], op)
			}
			for _, v := range h.versions[b.Policy] {
				if v.since <= op.returned && op.called <= v.until && !slices.Contains(op.policies, v.Policy) {
					op.policies = append(op.policies, v.Policy)
				}
			}
		}
		for _, op := range of {
			op.met = op.idempotencyKey != "" && slices.ContainsFunc(granted[op.idempotencyKey], func(g *operation) bool {
				return g != op && (op.batch == 0 || op.batch != g.batch) && (g.overlaps(op) || len(op.readings) > 1)
			})
		}
		histories = append(histories, of)
	}
	return histories
}

func (h *chronicle) now() time.Duration { return time.Since(h.started) }

func (h *chronicle) add(ops ...*operation) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.operations = append(h.operations, ops...)
}

// define is called by one client only, so that versions follow each other.
func (h *chronicle) define(random *rand.Rand, q *recorder, policy string) error {
	p := model.Policy{
		Capacity: 3 + random.Int64N(10),
		Every:    model.Micros(50 + random.Int64N(5000)),
		Stepped:  policy[0] == 's',
		Durable:  policy[len(policy)-7:] == "durable",
		Remember: []model.Micros{day, day, 20_000, 2_000}[random.IntN(4)],
	}
	if random.IntN(8) == 0 {
		p.Stepped = !p.Stepped
	}
	p.Refill = 1 + random.Int64N(p.Capacity)
	since := h.now()
	_, err := q.Exec(context.Background(), "select ratelimit_define_policy($1, $2, $3, $4, $5, $6, $7)",
		policy, p.Capacity, p.Refill, intervalOfDays(p.Every), p.Stepped, p.Durable, intervalOfDays(p.Remember))
	until := h.now()
	if before := h.versions[policy]; len(before) > 0 {
		before[len(before)-1].until = until
		h.changes++
	}
	h.versions[policy] = append(h.versions[policy], version{p, since, 1<<63 - 1})
	return err
}

// An actor makes the calls of one client.
type actor struct {
	*chronicle
	*recorder
	client int
	random *rand.Rand
}

func (a *actor) act() error {
	switch n := a.random.IntN(100); {
	case n < 45:
		return a.acquire()
	case n < 75:
		return a.acquireMany()
	case n < 83:
		return a.decide(peeks)
	case n < 91:
		return a.decide(refunds)
	case n < 93:
		return a.reset()
	case n < 95 || a.client > 0:
		return a.cleanUp()
	default:
		return a.define(a.random, a.recorder, a.bucket().Policy)
	}
}

func (a *actor) bucket() model.BucketID { return a.buckets[a.random.IntN(len(a.buckets))] }

func (a *actor) operation(kind string, bucket model.BucketID) *operation {
	return &operation{kind: kind, request: request{BucketID: bucket}, client: a.client, called: a.now()}
}

// request is an acquire, mostly of few tokens. A repeated idempotency key seldom has another cost.
func (a *actor) request(bucket model.BucketID) *operation {
	op := a.operation(acquires, bucket)
	switch n := a.random.IntN(20); {
	case n < 2:
	case n < 10:
		op.cost = 1
	case n < 19:
		op.cost = 1 + a.random.Int64N(6)
	default:
		op.cost = 13
	}
	if a.random.IntN(5) < 2 {
		key := a.random.Int64N(6)
		op.idempotencyKey = strconv.FormatInt(key, 10)
		if a.random.IntN(10) > 0 {
			op.cost = 1 + key%4
		}
	}
	return op
}

// answered records the answer of a call on one bucket. RL002 is an answer; other errors are returned.
func (op *operation) answered(d decision, err error) error {
	op.answer = &answer{Decision: &d}
	if sqlState(err) == string(model.IdempotencyMismatch) || errors.Is(err, client.ErrIdempotencyMismatch) {
		op.answer, err = &answer{Error: err.Error()}, nil
	}
	return err
}

// acquire, now and then in a transaction that may be rolled back.
func (a *actor) acquire() error {
	op := a.request(a.bucket())
	return a.transact(func() error { return op.answered(op.request.acquire(a)) }, op)
}

// transact makes the call of some operations.
func (a *actor) transact(call func() error, ops ...*operation) error {
	held := a.random.IntN(4) == 0
	if held {
		if _, err := a.Exec(context.Background(), "begin"); err != nil {
			return err
		}
	}
	start, called := time.Now(), a.now()
	err := call()
	if err != nil {
		return err
	}
	read := a.recorder.readings.since(start)
	end := "commit"
	if held && ops[0].batch == 0 && a.random.IntN(3) == 0 { // a batch that is undone has seen itself
		end = "rollback"
	}
	if held {
		if _, err := a.Exec(context.Background(), end); err != nil {
			return err
		}
	}
	returned := a.now()
	for _, op := range ops {
		op.called, op.returned, op.readings, op.undone = called, returned, read, held && end == "rollback"
		if op.kind == acquires && op.batch == 0 && op.denied() {
			op.readings = read[min(1, len(read)):] // the first is from before the update, which may have waited
		}
	}
	a.add(ops...)
	return nil
}

// acquireMany takes from several buckets, or as often as not from one alone.
func (a *actor) acquireMany() error {
	var ops []*operation
	switch a.random.IntN(4) {
	case 0: // all equal, and without a key
		op := a.request(a.bucket())
		op.idempotencyKey = ""
		for range 2 + a.random.IntN(4) {
			another := *op
			ops = append(ops, &another)
		}
	case 1, 2: // no keys
		for range 1 + a.random.IntN(6) {
			op := a.request(a.bucket())
			op.idempotencyKey = ""
			ops = append(ops, op)
		}
	default:
		for range 1 + a.random.IntN(6) {
			ops = append(ops, a.request(a.bucket()))
		}
	}
	a.mu.Lock()
	a.batches++
	batch := a.batches
	a.mu.Unlock()
	places := map[model.BucketID]int{}
	var requests []nullableRequest
	for _, op := range ops {
		op.batch, op.place = batch, places[op.BucketID]
		places[op.BucketID]++
		requests = append(requests, op.nullable())
	}
	return a.transact(func() error {
		answers, err := acquireMany(a, requests)
		for i, r := range answers {
			ops[i].answer = &r
		}
		return err
	}, ops...)
}

func (a *actor) acquireCombined() error {
	op := a.request(a.bucket())
	start := time.Now()
	op.called = a.now()
	d, err := op.by(context.Background(), a.combiner)
	op.returned = a.now()
	op.readings = a.chronicler.readings.since(start)
	err = op.answered(decisionOf(d), err)
	a.add(op)
	return err
}

// decide peeks or refunds.
func (a *actor) decide(kind string) error {
	op := a.operation(kind, a.bucket())
	op.cost = a.random.Int64N(5)
	return a.transact(func() error {
		return op.answered(decide(a, "ratelimit_"+kind+"($1, $2, $3)", op.Policy, op.Key, op.cost))
	}, op)
}

func (a *actor) reset() error {
	op := a.operation(resets, a.bucket())
	return a.transact(func() error {
		_, err := a.Exec(context.Background(), "select ratelimit_reset($1, $2)", op.Policy, op.Key)
		return err
	}, op)
}

func (a *actor) cleanUp() error {
	var ops []*operation
	for _, b := range a.buckets {
		ops = append(ops, a.operation(cleansUp, b))
	}
	return a.transact(func() error {
		_, err := a.Exec(context.Background(), "select ratelimit_cleanup()")
		return err
	}, ops...)
}
