package torture

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
	"golang.org/x/sync/errgroup"
)

// Clients call everything there is on few buckets at once, by clocks that disagree and jump. Their calls can be put in an order, within the
// time that each took, in which the model gives each of them the answer it got, in every field, by a clock reading it took.
func TestTorture_LinearizabilityOfCallsOnBuckets(t *testing.T) {
	w := newWorkload(kit.NewDB(t), "plain durable", "continuous durable", "stepped durable", "quota durable",
		"plain ephemeral", "continuous ephemeral", "stepped ephemeral", "quota ephemeral")
	w.judgeAll(kit.Torture(t, 40), "acquire_all, granted", "acquire_all, denied", "acquire, shadowed", "acquire, replayed", "settle, replayed",
		"reserve, waits", "requests in batches", "settlements without a grant", "transactions of two calls", "rolled back", "cleanup", "reset",
		"pause", "acquire_up_to, granted", "charge, granted", "refund", "changes of policies", "overrides", "policies dropped")
}

// Holders hold, renew and release slots of few keys at once, by clocks that disagree and jump, and leases end meanwhile. Their calls
// have an order as those on buckets have, each by the last reading of the clock that it took.
func TestTorture_LinearizabilityOfCallsOnSlots(t *testing.T) {
	newSlotsWorkload(kit.NewDB(t), "slots durable", "slots ephemeral").
		judgeAll(kit.Torture(t, 40), slices.Concat(metBySlots, []string{"hold, shadowed", "changes of policies", "overrides", "failed with 40001"})...)
}

var metBySlots = []string{
	"hold, granted", "hold, denied", "hold, replayed", "holds with another cost", "renew, granted", "renew, denied", "release, granted",
	"release, denied", "holders", "rolled back",
}

// judgeAll checks the histories of a run, and ends with it, when all has been met that has to be, or with the first that has no order.
func (w *workload) judgeAll(run *kit.TortureRun, meet ...string) {
	n := int64(0)
	w.judgeWhile(run, func() bool { n++; return run.GoesOn() || n <= 10*run.Steps && len(w.lacks(meet)) > 0 })
	require.Empty(run.T, w.lacks(meet))
	w.report(run)
}

// judgeWhile writes histories and checks them, until the first that has no order.
func (w *workload) judgeWhile(run *kit.TortureRun, goesOn func() bool) {
	w.write(goesOn, func(seed uint64, histories []history, err error) bool {
		w.judge(run.T, seed, histories, err)
		run.Progress("%d operations in %d histories", w.of("operations"), w.of("histories"))
		return !run.T.Failed()
	})
}

// judgeFour is judgeWhile for four histories.
func (w *workload) judgeFour(run *kit.TortureRun) {
	left := 4
	w.judgeWhile(run, func() bool { left--; return left >= 0 })
}

// judge checks the histories of a seed.
func (w *workload) judge(t *testing.T, seed uint64, histories []history, err error) {
	if err != nil {
		t.Errorf("%v: %+v\n%s", err, kit.PgError(err), kit.Repeats(t, seed))
	}
	w.count("histories")
	for _, h := range histories {
		w.count("histories of a bucket")
		for _, op := range h {
			w.count(append(op.met(), "operations")...)
		}
		verdict := "in order"
		switch violation, decided := h.check(); {
		case !decided:
			w.count(undecided)
			verdict = "undecided"
		case violation != "":
			t.Errorf("%s\n%s", violation, kit.Repeats(t, seed))
			verdict = "without an order"
		}
		if dir := os.Getenv("RATELIMIT_PROOF"); dir != "" && len(h) > 0 {
			h.append(t, filepath.Join(dir, "histories.txt"), seed, verdict)
		}
	}
}

// append writes a history behind those in a file, for make proof.
func (h history) append(t *testing.T, name string, seed uint64, verdict string) {
	var text strings.Builder
	fmt.Fprintf(&text, "%s, seed %d, %v: %s\n", t.Name(), seed, h[0].BucketID, verdict)
	for _, op := range h {
		fmt.Fprintf(&text, "%v\n", op)
	}
	file := kit.NoError(os.OpenFile(name, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644))(t)
	require.NoError(t, kit.ErrorOf(file.WriteString(text.String()+"\n")))
	require.NoError(t, file.Close())
}

const undecided = "histories of a bucket with too many orders to try"

func (w *workload) report(run *kit.TortureRun) {
	require.Less(run.T, w.of(undecided), w.of("histories of a bucket"))
	run.Counts(w.counts)
}

// met is what the operation shows: its function and its outcome, and what else is rare.
func (op *operation) met() (all []string) {
	all = append(all, op.Function)
	switch a := op.answer; {
	case a.Is(model.NoGrant):
		all = append(all, "settlements without a grant")
	case a.Is(model.IdempotencyMismatch) && op.Holder != "":
		all = append(all, "holds with another cost")
	case a == nil || a.Error != "" || op.Function == "holders" || op.Function == "reset":
	case a.Decision != nil:
		all = append(all, op.Function+", "+outcome(*a.Decision))
	default: // renew and release
		all = append(all, op.Function+", "+map[bool]string{true: "denied", false: "granted"}[a.Rows[0] == "" || a.Rows[0] == "f"])
	}
	for what, is := range map[string]bool{
		"rolled back": op.undone, "requests in batches": op.batch != 0, "commits without an answer": op.inDoubt,
		"transactions of two calls": op.then != nil || op.own != nil || op.Function == "reset" && op.sets != 0,
	} {
		if is {
			all = append(all, what)
		}
	}
	return all
}

// A bug planted in SQL is found.
func TestLinearizability_FindsPlantedBugs(t *testing.T) {
	pgtest.OncePerServer(t)
	kit.OnDBs(t, bugsOfHistories, func(t *testing.T, db *kit.TestDB, bugs []plantedBug) {
		for _, bug := range bugs {
			bug.plant(db)
		}
		w := newWorkload(db, "plain durable", "continuous durable", "stepped durable")
		w.mostly = mostly[bugs[0].function]
		w.requireNoOrder(t)
	})
}

// A bug about slots planted in SQL is found.
func TestLinearizability_FindsPlantedBugsOfSlots(t *testing.T) {
	pgtest.OncePerServer(t)
	bugs := maps.Clone(bugsOfSlotHistories)
	maps.Copy(bugs, bugsOfHolders)
	kit.OnDBs(t, bugs, func(t *testing.T, db *kit.TestDB, bug plantedBug) {
		bug.plant(db)
		newSlotsWorkload(db, "slots durable").requireNoOrder(t)
	})
}

// requireNoOrder writes up to 2,000 histories, until one has no order or a call fails.
func (w *workload) requireNoOrder(t *testing.T) {
	found, written := false, 0
	w.write(func() bool { written++; return written <= 2000 }, func(_ uint64, histories []history, err error) bool {
		found = err != nil || slices.ContainsFunc(histories, func(h history) bool {
			violation, decided := h.check()
			return decided && violation != ""
		})
		return !found
	})
	require.True(t, found, "the bug is not found in 2,000 histories")
	t.Logf("written when it was found: %d histories", written)
}

// mostly are the calls among which the bugs of a function show soon.
var mostly = map[string][]string{
	"ratelimit_acquire": {"acquire"}, "ratelimit_charge": {"acquire", "charge", "charge"}, "ratelimit_settle": {"acquire", "charge", "settle", "settle"},
	"ratelimit.moved_level": {"acquire", "charge", "settle", "settle"}, "ratelimit_acquire_up_to": {"acquire", "acquire_up_to", "acquire_up_to"},
	"ratelimit_pause":   {"acquire", "acquire", "acquire", "pause"},
	"ratelimit_reserve": {"acquire", "reserve", "reserve", "reserve"}, // most take what an update finds, without a row that was read
}

// A workload is clients who make random calls, one history after the other.
type workload struct {
	mostly   []string // functions that they call most, on one bucket; nil: of everything something, on several
	db       *kit.TestDB
	policies []string
	clients  []*clockedConn
	pool     *pgxpool.Pool // whose connections note the readings of the clock
	readings readings
	combiner client.Acquirer // on the pool
	oneIn    int             // so many histories goes by the combiner, too; 0: none
	key      func(name string) string
	seed     uint64 // of the next history
	calls    int    // of each client in a history
	faults   *faults
	citus    bool
	*tally   // of what histories have met
}

// newWorkload defines the policies by what their names say, and has clocks tell what they read.
func newWorkload(db *kit.TestDB, policies ...string) *workload {
	db.CatchDenials()
	db.Execute(`
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
	db.CleanUpAtOnce() // a history is over within seconds
	w := &workload{db: db, policies: policies, oneIn: 4, key: func(name string) string { return name }, seed: kit.FirstSeed(db.T), calls: 10, tally: newTally()}
	for range 5 {
		c := &clockedConn{}
		c.Conn = db.Connect(db.T, c.noteReadings)
		w.clients = append(w.clients, c)
	}
	w.pool = kit.Pool(db.T, db.URL, func(config *pgxpool.Config) { config.ConnConfig.OnNotice = w.readings.note })
	combiner := client.NewCombiner(w.pool)
	db.T.Cleanup(combiner.Close)
	w.combiner = combiner
	for _, policy := range policies {
		lasts := map[string]any{"capacity": int64(1), "refill": int64(1), "every": kit.SpanOf(1_000_000)}
		switch kindOfPolicy(policy) {
		case "slots":
			lasts = map[string]any{"capacity": int64(1), "lease": kit.SpanOf(1_000_000)}
		case "quota":
			lasts = map[string]any{"capacity": int64(1), "period": kit.SpanOf(kit.Day)}
		}
		lasts["policy"], lasts["durable"] = policy, isDurable(policy)
		require.NoError(db.T, w.clients[0].call("define_policy", lasts))
		if kindOfPolicy(policy) != "plain" {
			db.Execute(overrideSomeKey, policy)
		}
	}
	return w
}

// newSlotsWorkload has clocks that tick, so that calls meet the very end of a lease.
func newSlotsWorkload(db *kit.TestDB, policies ...string) *workload {
	w := newWorkload(db, policies...)
	w.oneIn = 0
	db.Mutate(kit.Mutation{
		Pattern:     `v_now := (clock_timestamp\(\) \+ v_ahead_us \* interval '1 microsecond');`,
		Replacement: fmt.Sprintf("v_now := date_bin('%d microseconds', $1, 'epoch');", tick),
	}, "ratelimit.clock")
	return w
}

const tick model.Micros = 200

// overrideSomeKey has every call look for overrides, but for those about plain policies, which have none. One that reads a policy just before its first override may go by the policy's numbers.
const overrideSomeKey = "select ratelimit_override($1, 'some key', 1)"

// kindOfPolicy is the first word of its name: plain, continuous, stepped, quota or slots.
func kindOfPolicy(policy string) string { kind, _, _ := strings.Cut(policy, " "); return kind }
func isSlots(policy string) bool        { return kindOfPolicy(policy) == "slots" }
func isDurable(policy string) bool      { return strings.HasSuffix(policy, "durable") }

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

// A clockedConn is a session that keeps the readings of its clock. No other has its application_name, nor one before it that has ended: a
// server that starts again in a container gives out the same process ids.
type clockedConn struct {
	*pgx.Conn
	readings readings
}

func (c *clockedConn) noteReadings(config *pgx.ConnConfig) {
	config.OnNotice = c.readings.note
	config.RuntimeParams["application_name"] = fmt.Sprint("history ", rand.Uint64())
}

// call makes a call that has no answer, with arguments by their names; those without a value are null.
func (c *clockedConn) call(function string, values map[string]any) error {
	return kit.ErrorOf(kit.Ask(c, function, "ratelimit_"+function, kit.ArgsOf(function, values)))
}

// write has histories checked beside the next ones, as long as both agree to go on.
func (w *workload) write(goesOn func() bool, check func(seed uint64, histories []history, err error) bool) {
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
	for ; goesOn() && !w.db.T.Failed(); w.seed++ {
		histories, err := w.history(w.seed)
		select {
		case unread <- written{w.seed, histories, err}:
		case <-stop:
			return
		}
	}
}

// A draft is one history of all buckets while it is made.
type draft struct {
	*workload
	seed     uint64
	started  time.Time
	buckets  []model.BucketID
	versions map[string][]version // of policies

	mu         sync.Mutex
	operations []*operation
	batches    int
	numbers    map[model.BucketID][]numbers // as the bucket's overrides gave them and took them away
	gone       map[string][]period          // when a policy was dropped, until it was there again
	dropping   sync.RWMutex                 // no override is set meanwhile
}

// A period is the time between two instants.
type period struct{ since, until time.Duration }

func (p period) overlaps(op *operation) bool { return p.since <= op.returned && op.called <= p.until }

// Numbers are an override, or nil for none, that may have been in force for a time.
type numbers struct {
	*model.Override
	left *model.Override // when what ends has been removed; nil for nothing
	period
}

const forever = time.Duration(math.MaxInt64)

// A version of a policy may have been in force between two instants.
type version struct {
	model.Policy
	period
}

func (w *workload) history(seed uint64) (histories []history, err error) {
	random := rand.New(rand.NewPCG(seed, 0))
	h := &draft{
		workload: w, seed: seed, started: time.Now(), versions: map[string][]version{},
		numbers: map[model.BucketID][]numbers{}, gone: map[string][]period{},
	}
	combined := w.oneIn > 0 && random.IntN(w.oneIn) == 0
	buckets := 2 + random.IntN(3)
	if w.mostly != nil {
		buckets = 1
	}
	for len(h.buckets) < buckets {
		b := model.BucketID{Policy: w.policies[random.IntN(len(w.policies))], Key: w.key(fmt.Sprint(seed, " ", len(h.buckets)))}
		if !slices.Contains(h.buckets, b) {
			h.buckets = append(h.buckets, b)
		}
	}
	for _, b := range h.buckets {
		h.numbers[b] = []numbers{{period: period{0, forever}}}
		if err := h.define(random, w.clients[0], b.Policy); err != nil {
			return nil, err
		}
	}
	if w.faults != nil && w.faults.prepare != nil {
		w.faults.prepare(w.db.T.(*testing.T), w.faults)
	}
	var callers errgroup.Group
	for i, conn := range w.clients {
		callers.Go(func() error {
			a := h.actor(conn, i)
			for range w.calls {
				if err := a.act(); err != nil {
					return err
				}
			}
			return nil
		})
		if combined {
			callers.Go(func() error {
				a := h.actor(nil, len(w.clients)+i)
				for range 5 {
					if err := a.acquireCombined(); err != nil {
						return err
					}
				}
				return nil
			})
		}
	}
	if w.faults != nil {
		h.happen(w.faults)
	}
	err = callers.Wait()
	w.readings.forget()
	for _, c := range w.clients {
		if w.faults != nil && c.Ping(context.Background()) != nil {
			err = errors.Join(err, w.reconnect(c))
		}
		c.readings.forget()
	}
	return h.finish(), err
}

// finish adds to each operation what only a look at all of them tells.
func (h *draft) finish() (histories []history) {
	for _, b := range h.buckets {
		var of history
		granted := map[string][]*operation{}
		for _, op := range h.operations {
			if op.BucketID != b {
				continue
			}
			of = append(of, op)
			if op.remembers() && !op.undone {
				granted[op.IdempotencyKey] = append(granted[op.IdempotencyKey], op)
			}
		}
		for _, op := range of {
			op.rules = h.rules(op, of)
			if op.then != nil {
				op.then.rules = op.rules
			}
			op.gone = slices.ContainsFunc(h.gone[b.Policy], func(p period) bool { return op.Function != "drop_policy" && p.overlaps(op) })
			if op.whole != nil && op.answer.Is(model.UnknownPolicy) {
				for _, policy := range op.whole.policies {
					op.gone = op.gone || slices.ContainsFunc(h.gone[policy], func(p period) bool { return p.overlaps(op) })
				}
			}
			op.contested = op.IdempotencyKey != "" && slices.ContainsFunc(granted[op.IdempotencyKey], func(g *operation) bool {
				return g != op && (op.batch == 0 || op.batch != g.batch) && (g.overlaps(op) || len(op.readings) > 1)
			})
		}
		histories = append(histories, of)
	}
	return histories
}

// rules are those by which an operation may have decided. What ends of an override, and clean-up may have removed because a
// clock was ahead, may be in force or not.
func (h *draft) rules(op *operation, of history) (all []rules) {
	add := func(p model.Policy, override *model.Override, number int) {
		if r := (rules{p, override, number}); !slices.Contains(all, r) {
			all = append(all, r)
		}
	}
	for _, v := range h.versions[op.Policy] {
		switch {
		case !v.overlaps(op):
			continue
		case op.own != nil:
			add(v.Policy, op.own.override, op.own.number)
			continue
		}
		for number, n := range h.numbers[op.BucketID] {
			if !n.overlaps(op) {
				continue
			}
			add(v.Policy, n.Override, number)
			if n.Override != nil && slices.ContainsFunc(of, func(c *operation) bool {
				return c.Function == "cleanup" && c.called <= op.returned && slices.ContainsFunc(c.readings, func(now time.Time) bool { return n.At(now) != *n.Override })
			}) {
				add(v.Policy, n.left, number)
			}
		}
	}
	return all
}

func (h *draft) now() time.Duration { return time.Since(h.started) }

func (h *draft) add(ops ...*operation) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.operations = append(h.operations, ops...)
}

// In one history of four, policies refill slowly, and in another overrides do: then buckets are empty on slow machines, too.
const (
	slowly           = 2
	slowlyOverridden = 3
)

// define is called by one client only, so that versions follow each other.
func (h *draft) define(random *rand.Rand, q *clockedConn, policy string) error {
	p := model.Policy{
		Capacity: 3 + random.Int64N(10), Every: model.Micros(50 + random.Int64N(5000)), Durable: isDurable(policy), Shadow: random.IntN(6) == 0,
		Remember: []model.Micros{kit.Day, kit.Day, 20_000, 2_000}[random.IntN(4)],
	}
	var args map[string]any
	switch kind := kindOfPolicy(policy); kind {
	case "slots":
		p = model.Policy{Capacity: 1 + random.Int64N(4), Lease: h.lease(random), Durable: p.Durable, Shadow: p.Shadow}
		args = map[string]any{"lease": kit.SpanOf(p.Lease)}
	case "quota":
		p.Calendar = h.calendar(random)
		args = map[string]any{"remember": kit.SpanOf(p.Remember), "period": kit.Span{Days: int32(p.Period.Days)}, "anchor": p.Anchor}
	default:
		p.Stepped = (kind == "stepped") != (random.IntN(8) == 0)
		if h.seed%4 == slowly {
			p.Every *= 1000
		}
		if p.Refill = 1 + random.Int64N(p.Capacity); random.IntN(8) == 0 {
			p.Refill = 0
		}
		args = map[string]any{"refill": p.Refill, "every": kit.SpanOf(p.Every), "stepped": p.Stepped, "remember": kit.SpanOf(p.Remember)}
	}
	args["policy"], args["capacity"], args["durable"], args["shadow"] = policy, p.Capacity, p.Durable, p.Shadow
	since := h.now()
	err := q.call("define_policy", args)
	until := h.now()
	if before := h.versions[policy]; len(before) > 0 {
		before[len(before)-1].until = until
		h.count("changes of policies")
	}
	h.versions[policy] = append(h.versions[policy], version{p, period{since, forever}})
	return err
}

// calendar has a turn while the calls are made.
func (h *draft) calendar(random *rand.Rand) model.Calendar {
	turn := time.Now().Add(time.Duration(random.Int64N(int64(40 * kit.Ms)))).Truncate(kit.Us).UTC()
	return model.Calendar{Period: model.Period{Days: 1 + random.IntN(3)}, Zone: "UTC", Anchor: turn}
}

// lease mostly ends while the calls are made, at a tick or not; beside crashes as often as not after them.
func (h *draft) lease(random *rand.Rand) model.Micros {
	switch n := random.IntN(4); {
	case h.faults != nil && n < 2:
		return 60_000_000
	case n == 0:
		return 1000 + model.Micros(random.Int64N(20_000))
	case n == 1:
		return 1_000_000
	}
	return tick * model.Micros(5+random.Int64N(40))
}

// setNumbers notes that a bucket has an override, or none, from an instant on; the one before ends at another.
func (h *draft) setNumbers(b model.BucketID, override *model.Override, since, until time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	before := h.numbers[b]
	before[len(before)-1].until = until
	next := numbers{Override: override, period: period{since, forever}}
	if override != nil && override.Stays != (model.Numbers{}) {
		next.left = &model.Override{Stays: override.Stays}
	}
	h.numbers[b] = append(before, next)
}

// An actor makes the calls of one client.
type actor struct {
	*draft
	*clockedConn
	client int
	random *rand.Rand
	strict bool // its transactions are REPEATABLE READ
}

func (h *draft) actor(conn *clockedConn, n int) *actor {
	return &actor{draft: h, clockedConn: conn, client: n, random: rand.New(rand.NewPCG(h.seed, uint64(n+1)))}
}

// act makes a call of the call table, or one that is more than that.
func (a *actor) act() error {
	plain := plainFunctions["tokens"]
	slots := isSlots(a.policies[0])
	if slots {
		plain = plainFunctions["slots"]
	}
	n := a.random.IntN(100)
	switch {
	case a.mostly != nil && a.random.IntN(4) > 0:
		return a.one(a.mostly[a.random.IntN(len(a.mostly))])
	case n < 24:
		return a.one("acquire")
	case a.faults != nil && n < 97 || n < 52 || slots && n < 85:
		return a.one(plain[a.random.IntN(len(plain))])
	case n < 76 && !slots && a.faults == nil:
		return []func() error{a.acquireMany, a.acquireMany, a.acquireAll, a.acquireAll, a.acquireManyWithSizes, a.acquireAndGiveBack}[a.random.IntN(6)]()
	case n < 92 && a.client < len(a.buckets) && a.faults == nil: // a bucket has one client who sets its override, so that these follow each other
		return a.override(a.buckets[a.client])
	case n < 96 || a.client > 0 || a.faults != nil:
		return a.cleanUp()
	case n < 98 && !slots:
		return a.drop()
	}
	return a.change()
}

// plainFunctions are those about one key whose whole answer the model of this key foretells, as often as the call table has them.
var plainFunctions = func() map[string][]string {
	all := map[string][]string{}
	for _, function := range often {
		switch f := kit.Functions[function]; {
		case strings.HasPrefix(f.Arguments+" ", "policy key ") && !strings.HasPrefix(f.Writes, "any"):
			for _, kind := range strings.Fields(cmp.Or(f.Writes, "tokens slots")) {
				all[kind] = append(all[kind], function)
			}
		case function == "holders":
			all["slots"] = append(all["slots"], function)
		}
	}
	return all
}()

func (a *actor) change() error { return a.define(a.random, a.clockedConn, a.bucket().Policy) }

func (a *actor) bucket() model.BucketID { return a.buckets[a.random.IntN(len(a.buckets))] }

func (a *actor) operation(function string, bucket model.BucketID) *operation {
	return &operation{Spending: kit.Spending{Function: function, BucketID: bucket}, client: a.client, called: a.now()}
}

// request is an acquire, mostly of few tokens. A repeated idempotency key seldom has another cost.
func (a *actor) request(bucket model.BucketID) *operation {
	op := a.operation("acquire", bucket)
	switch n := a.random.IntN(20); {
	case n < 2:
	case n < 10:
		op.Cost = 1
	case n < 19:
		op.Cost = 1 + a.random.Int64N(6)
	default:
		op.Cost = 13
	}
	if a.random.IntN(5) < 2 {
		key := a.random.Int64N(4)
		op.IdempotencyKey = strconv.FormatInt(key, 10)
		if a.random.IntN(10) > 0 {
			op.Cost = 1 + key%4
		}
	}
	return op
}

// plain is one call of a function. What its arguments are by the call table tells how they are drawn.
func (a *actor) plain(function string, bucket model.BucketID) *operation {
	op := a.request(bucket)
	op.Function = function
	for _, of := range kit.Functions[function].List() {
		switch of.Kind {
		case "granted":
			if op.Cost = a.random.Int64N(8); op.IdempotencyKey == "" {
				op.IdempotencyKey = strconv.FormatInt(a.random.Int64N(4), 10)
			}
		case "max_wait":
			if op.MaxWait = model.Micros(a.random.Int64N(8000)); a.seed%4 == slowly {
				op.MaxWait *= 1000 // a bucket that fills in milliseconds is full again before a slow server is asked
			}
		case "pause_for":
			op.MaxWait = model.Micros(1_000 + a.random.IntN(10_000))
		case "at_least":
			op.AtLeast = 1 + a.random.Int64N(3)
			op.Cost = op.AtLeast + a.random.Int64N(6)
		case "holder":
			op.Holder = string(rune('a' + a.random.IntN(4)))
		case "slots":
			if op.Cost = 1 + max(0, a.random.Int64N(5)-2); a.random.IntN(10) > 0 { // mostly one cost of a holder
				op.Cost = 1 + int64(op.Holder[0])%3
			}
		}
	}
	if function == "enforce" { // which answers as acquire does
		op.Function, op.enforced = "acquire", true
	}
	return op
}

// one makes one call. About slots it may be in a transaction that is stricter than READ COMMITTED, which may fail and has done nothing then.
func (a *actor) one(function string) error {
	if rare := function == "reset" || function == "pause"; rare && a.random.IntN(4) > 0 { // they leave little of what was before
		function = "acquire"
	}
	if isSlots(a.policies[0]) && function == "acquire" {
		function = "hold"
	}
	op := a.plain(function, a.bucket())
	send := func() error { return op.sent(a) }
	if isSlots(op.Policy) || a.citus && a.random.IntN(3) == 0 {
		a.strict = a.random.IntN(2) == 0
		_, err := a.transactIn(a.random.IntN(3) == 0, send, op)
		if a.strict && kit.SQLState(err) == "40001" {
			a.count("failed with 40001")
			err = nil
		}
		a.strict = false
		return err
	}
	err := a.transact(send, op)
	if err != nil || function != "settle" || op.answer == nil || op.answer.Decision == nil {
		return err
	}
	again := a.operation(function, op.BucketID) // as if there had been no answer
	again.Cost, again.IdempotencyKey = op.Cost, op.IdempotencyKey
	return a.transact(func() error { return again.sent(a) }, again)
}

// sent makes the call, and notes its answer. ratelimit_enforce is called through a function that makes a denial of its error.
func (op *operation) sent(q kit.Querier) error {
	name := "ratelimit_" + op.Function
	if op.enforced {
		name = "enforced"
	}
	return op.answered(kit.Ask(q, op.Function, name, op.Args()))
}

// answered notes an answer. Some errors are answers; others are returned.
func (op *operation) answered(a kit.Answer, err error) error {
	op.answer = &a
	if a := errorAnswer(err); a != nil {
		op.answer, err = a, nil
	}
	return err
}

// errorAnswer is the answer that an error is: that of an idempotency key, of a policy that was dropped, or of a pause that nothing would
// follow. It is nil for other errors.
func errorAnswer(err error) *kit.Answer {
	for code, is := range map[model.Error]error{
		model.IdempotencyMismatch: client.ErrIdempotencyMismatch, model.UnknownPolicy: client.ErrUnknownPolicy, model.NoGrant: client.ErrNoGrant,
		model.Settled: client.ErrSettled, model.InvalidArgument: client.ErrInvalidArgument,
	} {
		if kit.SQLState(err) == string(code) || errors.Is(err, is) {
			return &kit.Answer{Error: fmt.Sprintf("%s: %v", code, err)}
		}
	}
	return nil
}

// transact makes the call of some operations, now and then in a transaction that may be rolled back.
func (a *actor) transact(call func() error, ops ...*operation) error {
	return kit.ErrorOf(a.transactIn(a.random.IntN(4) == 0, call, ops...))
}

// transactIn is transact, in a transaction or not. Beside faults each call is in one: what has no answer before its commit is undone.
func (a *actor) transactIn(held bool, call func() error, ops ...*operation) (committed bool, err error) {
	held = held || a.faults != nil
	start, called := time.Now(), a.now()
	isLost := func(err error) bool { return a.faults != nil && isOutage(err) }
	exec := func(sql string) error { return kit.ErrorOf(a.Exec(context.Background(), sql)) }
	if held {
		begin := "begin"
		if a.strict {
			begin = "begin isolation level repeatable read"
		}
		if err := exec(begin); isLost(err) {
			return false, a.reconnect(a.clockedConn)
		} else if err != nil {
			return false, err
		}
	}
	if err := call(); isLost(err) {
		return false, a.reconnect(a.clockedConn)
	} else if err != nil {
		if held {
			err = errors.Join(err, exec("rollback"))
		}
		return false, a.unlessMoved(err)
	}
	read := a.clockedConn.readings.since(start)
	committed = true
	for _, op := range ops { // a transaction that met an error is aborted
		committed = committed && (!held || op.batch != 0 || op.answer == nil || op.answer.Error == "")
	}
	if held && a.random.IntN(3) == 0 && (len(ops) == 0 || ops[0].batch == 0) { // a batch that is undone has seen itself
		committed = false
	}
	inDoubt := false
	if held {
		end := "commit"
		if !committed {
			end = "rollback"
		}
		if err = a.end(end); isLost(err) {
			inDoubt, err = committed, a.reconnect(a.clockedConn)
		}
		if err != nil {
			return false, err
		}
	}
	returned := a.now()
	for _, op := range ops {
		op.called, op.returned, op.readings, op.undone, op.inDoubt = called, returned, read, !committed, inDoubt
		op.cutReadings(ops)
	}
	for _, op := range ops {
		// but what is a part of another, or was not called
		if ops[0].then != op && (op.answer != nil || op.Function == "reset" || op.Function == "cleanup") {
			a.add(op)
		}
	}
	return committed, nil
}

// unlessMoved is nil in place of the error of a call that a move of its shard had fail, and so took nothing.
func (a *actor) unlessMoved(err error) error {
	if a.citus && kit.HasMoved(err) {
		a.count("failed as a shard moved")
		return nil
	}
	return err
}

// end ends a transaction. Beside faults the connection may end then, without a word, or right after the word was sent.
func (a *actor) end(how string) error {
	silent := errors.New("the session has ended without a word")
	if a.faults != nil && a.random.IntN(8) == 0 {
		if how == "commit" {
			a.PgConn().Frontend().Send(&pgproto3.Query{String: how})
			_ = a.PgConn().Frontend().Flush()
		}
		return silent
	}
	return kit.ErrorOf(a.Exec(context.Background(), how))
}

// cutReadings leaves the readings by which an operation may have decided, and tells whether it read numbers again.
func (op *operation) cutReadings(ops []*operation) {
	read := op.readings
	if op.Function == "acquire" && op.batch == 0 && op.denied() && !op.mayBeReplayed(op.answer) {
		before := 1 // the update, which may have waited
		if kindOfPolicy(op.Policy) == "quota" {
			before = 2 // acquire's own, and that of the steps of a quota
		}
		op.readings = read[min(before, len(read)):]
	}
	// A round of decide_in_order after the first reads numbers when it has locked the buckets, and a batch that takes nothing
	// reads them with the buckets. Whatever else takes keeps to numbers from before. How often it reads the clock tells which it was.
	switch {
	case op.whole != nil && op.batch == 0: // two tries of ratelimit_acquire_all, and its batch
		op.reread = len(read) > 3+batchReadings+1
	case op.whole != nil:
		op.reread = len(read) > batchReadings+1 || !slices.ContainsFunc(ops, (*operation).takes)
	case op.batch != 0:
		first := firstReadings
		if !slices.ContainsFunc(ops, func(op *operation) bool { return op.IdempotencyKey != "" }) {
			first = plainReadings
		}
		op.reread = len(read) > first || !slices.ContainsFunc(ops, func(op *operation) bool { return op.takes() || op.answer.Taken > 0 })
	}
}

// Readings of the clock by a batch that keeps to numbers from before it took anything.
const (
	firstReadings = 2 // one of the fast path, and one of the round that creates rows
	plainReadings = 3 // of single requests without an idempotency key: plain denials are looked for between
	batchReadings = 3 // of the fast path of requests of several charges: it may begin again, and lock
)

// The oracle counts readings of the clock, also those of a batch that creates rows by what its first round saw.
func TestLinearizability_ReadingsOfTheFirstRound(t *testing.T) {
	t.Parallel()
	w := newWorkload(kit.NewDB(t), "durable", "ephemeral")
	for call, readings := range map[string]int{
		"select ratelimit_acquire_many('{durable,ephemeral}', '{a,b}')":                            plainReadings,
		"select ratelimit_acquire_many('{durable,durable}', '{c,d}', idempotency_keys => '{1,2}')": firstReadings,
		"select ratelimit_acquire_many('{durable,ephemeral}', '{e,f}', sizes => '{2}')":            firstReadings,
	} {
		r := w.clients[0]
		r.readings.forget()
		require.NoError(t, kit.ErrorOf(r.Exec(t.Context(), call)))
		require.Len(t, r.readings.all, readings, call)
	}
}

// acquireAndGiveBack refunds or settles what it took. It is one operation if the acquire locks the bucket.
func (a *actor) acquireAndGiveBack() error {
	op := a.request(a.bucket())
	back := a.operation("refund", op.BucketID)
	back.Cost = a.random.Int64N(5)
	if op.IdempotencyKey != "" && a.random.IntN(2) == 0 {
		back.Function, back.IdempotencyKey = "settle", op.IdempotencyKey
	}
	return kit.ErrorOf(a.transactIn(true, func() error {
		if err := op.sent(a); err != nil || op.answer.Error != "" {
			return err
		}
		if op.takes() {
			op.then = back
		}
		return back.sent(a)
	}, op, back))
}

// acquireAll takes from several buckets, all or none.
func (a *actor) acquireAll() error {
	r, ops := a.wholeRequest(4)
	return a.transact(func() error {
		w, err := r.AcquireAll(a)
		return noteWhole(w, err, r, ops)
	}, ops...)
}

func (a *actor) acquireManyWithSizes() error {
	var (
		requests []kit.WholeRequest
		parts    [][]*operation
		all      []*operation
	)
	for range 1 + a.random.IntN(3) {
		r, ops := a.wholeRequest(3)
		requests, parts, all = append(requests, r), append(parts, ops), append(all, ops...)
	}
	a.batch(all)
	return a.transact(func() error {
		answers, err := kit.AcquireManyWithSizes(a, requests)
		for i, answer := range answers {
			err = errors.Join(err, answeredWhole(answer, requests[i], parts[i]))
		}
		return err
	}, all...)
}

// wholeRequest is a request of up to so many charges, and its operations, one on each bucket.
func (a *actor) wholeRequest(most int) (r kit.WholeRequest, ops []*operation) {
	whole := &wholePart{}
	byBucket := map[model.BucketID]*operation{}
	first := a.request(a.bucket())
	r.IdempotencyKey = first.IdempotencyKey
	for i := range 1 + a.random.IntN(most) {
		op := first
		if i > 0 {
			b := a.bucket()
			for a.citus && b.Key != first.Key {
				b = a.bucket()
			}
			op = a.request(b)
			op.IdempotencyKey = first.IdempotencyKey
			if op.IdempotencyKey != "" && a.random.IntN(10) > 0 {
				op.Cost = first.Cost
			}
		}
		op.Function, op.whole = "acquire_all", whole
		r.Charges = append(r.Charges, model.Charge{BucketID: op.BucketID, Cost: op.Cost})
		if same := byBucket[op.BucketID]; same != nil {
			same.Cost += op.Cost
			continue
		}
		byBucket[op.BucketID] = op
		whole.policies = append(whole.policies, op.Policy)
		ops = append(ops, op)
	}
	return r, ops
}

// noteWhole notes the answer of a request of several charges, unless it is an error that is no answer.
func noteWhole(w kit.Whole, err error, r kit.WholeRequest, ops []*operation) error {
	if e := errorAnswer(err); e != nil {
		return answeredWhole(kit.WholeAnswer{Error: e.Error}, r, ops)
	} else if err != nil {
		return err
	}
	return answeredWhole(kit.WholeAnswer{Whole: &w}, r, ops)
}

// answeredWhole notes the answer of a request of several charges. Elements of one bucket must have one answer, and
// the request must be granted if and only if each bucket grants.
func answeredWhole(w kit.WholeAnswer, r kit.WholeRequest, ops []*operation) error {
	if w.Whole == nil {
		for _, op := range ops {
			op.answer = &kit.Answer{Error: w.Error}
		}
		return nil
	}
	ops[0].whole.granted = w.Whole.Allowed
	granted := true
	for i, d := range w.Whole.Decisions {
		granted = granted && d.Allowed
		for _, op := range ops {
			switch {
			case op.BucketID != r.Charges[i].BucketID:
			case op.answer == nil:
				op.answer = &kit.Answer{Decision: &d}
			case *op.answer.Decision != d:
				return fmt.Errorf("two answers of one bucket: %+v", *w.Whole)
			}
		}
	}
	if len(w.Whole.Decisions) != len(r.Charges) || granted != w.Whole.Allowed {
		return fmt.Errorf("%+v is answered %+v", r, *w.Whole)
	}
	return nil
}

// batch numbers the operations of one call.
func (a *actor) batch(ops []*operation) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.batches++
	places := map[model.BucketID]int{}
	for _, op := range ops {
		op.batch, op.place = a.batches, places[op.BucketID]
		places[op.BucketID]++
	}
}

// override patches what a bucket has of its own or takes it away, alone or in one transaction with a reset or an acquire.
func (a *actor) override(b model.BucketID) error {
	if kindOfPolicy(b.Policy) == "plain" {
		return a.cleanUp()
	}
	a.dropping.RLock()
	defer a.dropping.RUnlock()
	args := map[string]any{"policy": b.Policy, "key": b.Key}
	if a.random.IntN(4) == 0 {
		called := a.now()
		err := a.call("remove_override", args)
		a.setNumbers(b, nil, called, a.now())
		return err
	}
	capacity, every := a.random.Int64N(14), model.Micros(50+a.random.Int64N(5000))
	ends := a.random.IntN(3) == 0
	switch kindOfPolicy(b.Policy) {
	case "slots":
		capacity, args["lease"] = a.random.Int64N(5), fmt.Sprint(int64(a.lease(a.random)), " us")
	case "quota":
		if calendar := a.calendar(a.random); !ends {
			args["time_zone"], args["anchor"] = calendar.Zone, calendar.Anchor
		}
	default:
		if a.seed%4 == slowlyOverridden {
			every *= 1000
		}
		args["refill"], args["every"] = a.random.Int64N(capacity+1), fmt.Sprint(int64(every), " us")
	}
	switch part := a.random.IntN(4); { // what was set before remains
	case part == 0:
		args = map[string]any{"policy": b.Policy, "key": b.Key, "capacity": capacity}
	case part > 1 || len(args) == 2:
		args["capacity"] = capacity
	}
	if ends {
		args["expires_at"] = time.Now().Add(12*kit.Ms + time.Duration(a.random.Int64N(int64(20*kit.Ms)))).Truncate(kit.Us).UTC() // no clock is that far ahead
	}
	o := &model.Override{}
	var ops []*operation
	a.mu.Lock()
	number := len(a.numbers[b])
	a.mu.Unlock()
	switch kind := a.random.IntN(4); {
	case kind == 0:
		ops = append(ops, a.operation("reset", b))
	case kind < 3 && !isSlots(b.Policy):
		ops = append(ops, a.request(b))
		ops[0].own = &rules{override: o, number: number}
	}
	called := a.now()
	committed, err := a.transactIn(len(ops) > 0 || a.random.IntN(4) == 0, func() error {
		if err := a.patch(o, args); err != nil || len(ops) == 0 {
			return err
		}
		return ops[0].sent(a)
	}, ops...)
	switch {
	case kit.SQLState(err) == string(model.InvalidArgument) && ends: // too late
		return nil
	case committed:
		a.setNumbers(b, o, called, a.now())
		a.count("overrides")
		if len(ops) > 0 && (ops[0].Function == "reset" || ops[0].takes()) {
			ops[0].sets = number
		}
	}
	return err
}

// patch makes a call of ratelimit_override, and has what it answers.
func (c *clockedConn) patch(o *model.Override, values map[string]any) error {
	rows, err := c.Query(context.Background(), "select capacity, refill, (extract(epoch from every) * 1000000)::bigint, time_zone, anchor, "+
		"(extract(epoch from lease) * 1000000)::bigint, expires_at from ratelimit_override($1, $2, $3, $4, $5, $6, $7, $8, $9)",
		kit.ArgsOf("override", values)...)
	if err != nil {
		return err
	}
	var n model.Numbers
	var ends *time.Time
	return kit.ErrorOf(pgx.ForEachRow(rows, []any{&n.Capacity, &n.Refill, &n.Every, &n.Zone, &n.Anchor, &n.Lease, &ends}, func() error {
		if ends == nil {
			o.Stays = n
		} else {
			o.Ends, o.Expires = n, ends.UTC()
		}
		return nil
	}))
}

// drop drops a policy and defines it anew.
func (a *actor) drop() error {
	a.dropping.Lock()
	defer a.dropping.Unlock()
	policy := a.bucket().Policy
	called := a.now()
	dropped := called
	dropIt := func(q *clockedConn) error {
		err := q.call("drop_policy", map[string]any{"policy": policy})
		if dropped = a.now(); err == nil {
			err = a.define(a.random, q, policy)
		}
		if err == nil && kindOfPolicy(policy) != "plain" {
			err = kit.ErrorOf(q.Exec(context.Background(), overrideSomeKey, policy))
		}
		return err
	}
	var err error
	if a.random.IntN(2) == 0 {
		err = pgx.BeginFunc(context.Background(), a.Conn, func(pgx.Tx) error { return dropIt(a.clockedConn) })
		dropped = a.now()
	} else {
		err = dropIt(a.clockedConn)
	}
	if err != nil {
		return err
	}
	until := a.now()
	versions := a.versions[policy]
	versions[len(versions)-2].until = until
	versions[len(versions)-1].since = called
	a.gone[policy] = append(a.gone[policy], period{called, until})
	a.count("policies dropped")
	for _, b := range a.buckets {
		if b.Policy != policy {
			continue
		}
		op := a.operation("drop_policy", b)
		op.called, op.returned = called, dropped
		a.add(op)
		a.setNumbers(b, nil, called, dropped)
	}
	return nil
}

// acquireMany takes from several buckets, or as often as not from one alone.
func (a *actor) acquireMany() error {
	var ops []*operation
	switch kind := a.random.IntN(4); kind {
	case 0: // all equal, and without a key
		op := a.request(a.bucket())
		op.IdempotencyKey = ""
		for range 2 + a.random.IntN(4) {
			another := *op
			ops = append(ops, &another)
		}
	default:
		for range 1 + a.random.IntN(6) {
			op := a.request(a.bucket())
			if kind < 3 {
				op.IdempotencyKey = ""
			}
			ops = append(ops, op)
		}
	}
	a.batch(ops)
	var requests []kit.NullableRequest
	for _, op := range ops {
		requests = append(requests, op.request().Nullable())
	}
	return a.transact(func() error {
		answers, err := kit.AcquireMany(a, requests)
		for i, r := range answers {
			ops[i].answer = &r
		}
		return err
	}, ops...)
}

func (op *operation) request() kit.Request {
	return kit.Request{BucketID: op.BucketID, Cost: op.Cost, IdempotencyKey: op.IdempotencyKey}
}

func (a *actor) acquireCombined() error {
	ctx := context.Background()
	start := time.Now()
	var ops []*operation
	var err error
	if called := a.now(); a.random.IntN(2) == 0 {
		ops = []*operation{a.request(a.bucket())}
		ops[0].called = called
		var d client.Decision
		d, err = ops[0].request().By(ctx, a.combiner)
		err = ops[0].answered(kit.Answer{Decision: new(kit.DecisionOf(d))}, err)
	} else {
		var r kit.WholeRequest
		var w kit.Whole
		r, ops = a.wholeRequest(3)
		w, err = r.By(ctx, a.combiner)
		err = noteWhole(w, err, r, ops)
		for _, op := range ops {
			op.called = called // not reread: others in its call may have taken, and kept to what they had read
		}
	}
	for _, op := range ops {
		op.returned, op.readings = a.now(), a.workload.readings.since(start)
	}
	if err == nil {
		a.add(ops...)
	}
	return a.unlessMoved(err)
}

func (a *actor) cleanUp() error {
	if a.citus { // no node tells another's readings of the clock by clean-up
		return a.one("acquire")
	}
	var ops []*operation
	for _, b := range a.buckets {
		ops = append(ops, a.operation("cleanup", b))
	}
	return a.transact(func() error { return kit.ErrorOf(a.Exec(context.Background(), "select ratelimit_cleanup()")) }, ops...)
}
