package torture

import (
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
	run := kit.Torture(t, 40)
	c := newChronicler(kit.NewDB(t), "continuous durable", "stepped durable", "quota durable", "continuous ephemeral", "stepped ephemeral", "quota ephemeral")
	n := operationCounts{}
	n.judgeAll(t, run, c)
	n["changes of policies"], n["overrides"], n["policies dropped"] = c.changes, c.overrides, c.drops
	require.NotContains(t, slices.Collect(maps.Values(n)), 0, "%v", n)
	n.report(run)
}

// operationCounts count what histories have met.
type operationCounts map[string]int

// judgeAll checks the histories of a run, and ends with it or with the first that has no order.
func (n operationCounts) judgeAll(t *testing.T, run *kit.TortureRun, c *chronicler) {
	c.write(run.GoesOn, func(seed uint64, histories []history, err error) bool {
		n.judge(t, seed, histories, err)
		run.Progress("%d operations in %d histories", n["operations"], n["histories"])
		return !t.Failed()
	})
}

// judge checks the histories of a seed.
func (n operationCounts) judge(t *testing.T, seed uint64, histories []history, err error) {
	if err != nil {
		t.Errorf("%v: %+v\n%s", err, kit.PgError(err), kit.Repeats(t, seed))
	}
	n["histories"]++
	for _, h := range histories {
		n["histories of a bucket"]++
		n.count(h)
		verdict := "in order"
		switch violation, decided := h.check(); {
		case !decided:
			n[undecided]++
			verdict = "undecided"
		case violation != "":
			t.Errorf("%s\n%s", violation, kit.Repeats(t, seed))
			verdict = "without an order"
		}
		if dir := os.Getenv("RATELIMIT_PROOF"); dir != "" {
			h.write(t, filepath.Join(dir, "histories.txt"), seed, verdict)
		}
	}
}

// write appends a history to a file, for make proof.
func (h history) write(t *testing.T, name string, seed uint64, verdict string) {
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

func (n operationCounts) report(run *kit.TortureRun) {
	require.Less(run.T, n[undecided], n["histories of a bucket"])
	run.Counts(n)
}

func (n operationCounts) count(h history) {
	n["operations"] += len(h)
	for _, op := range h {
		if op.undone {
			n["rolled back"]++
		}
		if isSlots(op.Policy) {
			n[op.kindOfLent()]++
			continue
		}
		var d kit.Decision
		decided := op.answer != nil && op.answer.Decision != nil
		if decided {
			d = *op.answer.Decision
		}
		asks, isNew := decided && (op.kind == acquires || op.kind == shares), decided && !d.Replayed
		for what, met := range map[string]bool{
			"grants":                                asks && isNew && !d.Shadowed && op.takes(),
			"denials":                               asks && isNew && !d.Shadowed && !d.Allowed,
			"shadowed":                              asks && isNew && d.Shadowed,
			"replays":                               d.Replayed && (asks || op.spends() && op.kind != settles),
			"requests in batches":                   op.batch != 0,
			"shares of granted requests of several": op.kind == shares && op.whole.granted,
			"shares of denied requests of several":  op.kind == shares && !op.whole.granted,
			"charges":                               op.kind == charges && isNew,
			"settlements":                           op.kind == settles && isNew && !d.Shadowed,
			"settlements that came again":           op.kind == settles && d.Replayed,
			"settlements without a grant":           op.spends() && op.answer.Is(model.NoGrant),
			"reservations of what was there":        op.kind == reserves && isNew && d.Allowed && d.RetryAfter <= 0,
			"reservations that wait":                op.kind == reserves && isNew && d.Allowed && d.RetryAfter > 0,
			"pauses":                                op.kind == pauses && decided,
			"acquires of what there was":            op.kind == takesAll && isNew && d.Allowed,
			"transactions of two calls":             op.then != nil || op.own != nil || op.kind == resets && op.sets != 0,
			"buckets cleaned up":                    op.kind == cleansUp,
		} {
			if n[what] += 0; met {
				n[what]++
			}
		}
	}
}

// A bug planted in SQL is found.
func TestLinearizability_FindsPlantedBugs(t *testing.T) {
	pgtest.OncePerServer(t)
	kit.OnDBs(t, bugsOfHistories, func(t *testing.T, db *kit.TestDB, bugs []plantedBug) {
		for _, bug := range bugs {
			bug.plant(db)
		}
		c := newChronicler(db, "continuous durable", "stepped durable")
		c.mostly = mostly[bugs[0].function]
		c.requireNoOrder(t)
	})
}

// requireNoOrder writes up to 2,000 histories, until one has no order or a call fails.
func (c *chronicler) requireNoOrder(t *testing.T) {
	found, written := false, 0
	c.write(func() bool { written++; return written <= 2000 }, func(_ uint64, histories []history, err error) bool {
		found = err != nil || slices.ContainsFunc(histories, func(h history) bool {
			violation, decided := h.check()
			return decided && violation != ""
		})
		return !found
	})
	require.True(t, found, "the bug is not found in 2,000 histories")
	t.Logf("written when it was found: %d histories", written)
}

var acquireOrSpend = oneIn(3, (*actor).acquire, (*actor).spend)

// mostly are the calls among which the bugs of a function show soon.
var mostly = map[string]func(*actor) error{
	"ratelimit_acquire":       (*actor).acquire,
	"ratelimit_charge":        acquireOrSpend,
	"ratelimit_settle":        acquireOrSpend,
	"ratelimit_reserve":       oneIn(4, (*actor).acquire, (*actor).reserve), // most take what an update finds, without a row that was read
	"ratelimit_acquire_up_to": acquireOrSpend,
	"ratelimit.moved_level":   acquireOrSpend,
	"ratelimit_pause":         oneIn(4, func(a *actor) error { return a.decide(pauses) }, (*actor).acquire),
}

// oneIn makes the first call once in n times, and else the other.
func oneIn(n int, first, other func(*actor) error) func(*actor) error {
	return func(a *actor) error {
		if a.random.IntN(n) == 0 {
			return first(a)
		}
		return other(a)
	}
}

// A chronicler has clients make random calls, one history after the other.
type chronicler struct {
	mostly                    func(*actor) error // what they do most, on one bucket; nil: of everything something, on several
	db                        *kit.TestDB
	policies                  []string
	clients                   []*recorder
	pool                      *pgxpool.Pool // whose connections note the readings of the clock
	readings                  readings
	combiner                  client.Acquirer // on the pool
	oneIn                     int             // so many histories goes by the combiner, too
	key                       func(name string) string
	seed                      uint64 // of the next history
	changes, overrides, drops int
	conflicts                 int // of REPEATABLE READ
}

// newChronicler defines the policies by what their names say, and has clocks tell what they read.
func newChronicler(db *kit.TestDB, policies ...string) *chronicler {
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
	c := &chronicler{db: db, policies: policies, oneIn: 4, key: func(name string) string { return name }, seed: kit.FirstSeed(db.T)}
	for range 5 {
		c.clients = append(c.clients, newRecorder(db))
	}
	c.pool = kit.Pool(db.T, db.URL, func(config *pgxpool.Config) { config.ConnConfig.OnNotice = c.readings.note })
	combiner := client.NewCombiner(c.pool)
	db.T.Cleanup(combiner.Close)
	c.combiner = combiner
	for _, policy := range policies {
		switch {
		case isSlots(policy):
			db.Lend(policy, 1, time.Second, durability(policy))
		case isQuota(policy):
			db.Execute("select ratelimit_define_policy($1, 1, durable => $2, period => '1 day')", policy, isDurable(policy))
		default:
			db.DefinePolicy(policy, 1, 1, time.Second, durability(policy))
		}
		db.Execute(overrideSomeKey, policy)
	}
	return c
}

// overrideSomeKey has every call look for overrides. One that reads a policy just before its first override may go by the policy's numbers.
const overrideSomeKey = "select ratelimit_override($1, 'some key')"

func isQuota(policy string) bool   { return strings.HasPrefix(policy, "quota") }
func isDurable(policy string) bool { return strings.HasSuffix(policy, "durable") }

func durability(policy string) kit.PolicyOption {
	if isDurable(policy) {
		return kit.Durable
	}
	return kit.Ephemeral
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

func newRecorder(db *kit.TestDB) *recorder {
	r := &recorder{}
	r.Conn = db.Connect(db.T, func(config *pgx.ConnConfig) { config.OnNotice = r.readings.note })
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
	for ; goesOn() && !c.db.T.Failed(); c.seed++ {
		histories, err := c.history(c.seed)
		select {
		case unread <- written{c.seed, histories, err}:
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
	period
}

const forever = time.Duration(math.MaxInt64)

// A version of a policy may have been in force between two instants.
type version struct {
	model.Policy
	period
}

func (c *chronicler) history(seed uint64) (histories []history, err error) {
	random := rand.New(rand.NewPCG(seed, 0))
	h := &chronicle{
		chronicler: c, seed: seed, started: time.Now(), combined: c.oneIn > 0 && random.IntN(c.oneIn) == 0, versions: map[string][]version{},
		numbers: map[model.BucketID][]numbers{}, gone: map[string][]period{},
	}
	buckets := 2 + random.IntN(3)
	if c.mostly != nil {
		buckets = 1
	}
	for i := range buckets {
		h.buckets = append(h.buckets, model.BucketID{Policy: c.policies[random.IntN(len(c.policies))], Key: c.key(fmt.Sprint(seed, " ", i))})
	}
	for _, b := range h.buckets {
		h.numbers[b] = []numbers{{nil, period{0, forever}}}
		if err := h.define(random, c.clients[0], b.Policy); err != nil {
			return nil, err
		}
	}
	var callers errgroup.Group
	for i, r := range c.clients {
		callers.Go(func() error {
			a := &actor{h, r, i, rand.New(rand.NewPCG(seed, uint64(i+1))), false}
			for n := range 10 {
				act := a.act
				switch once := i == 0 && n == 5 && c.mostly == nil; {
				case isSlots(c.policies[0]):
					act = a.actOnSlots // too seldom to be left to chance
				case once && seed%4 == 0:
					act = a.drop
				case once && seed%4 == 1:
					act = a.change
				case once && seed%4 == slowly:
					act = a.reserveOn
				}
				if err := act(); err != nil {
					return err
				}
			}
			return nil
		})
		if h.combined {
			callers.Go(func() error {
				a := &actor{h, nil, len(c.clients) + i, rand.New(rand.NewPCG(seed, uint64(len(c.clients)+i+1))), false}
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
			if op.remembers() && !op.undone {
				granted[op.IdempotencyKey] = append(granted[op.IdempotencyKey], op)
			}
		}
		for _, op := range of {
			op.rules = h.rules(op, of)
			if op.then != nil {
				op.then.rules = op.rules
			}
			op.gone = slices.ContainsFunc(h.gone[b.Policy], func(p period) bool { return op.kind != drops && p.overlaps(op) })
			if op.whole != nil && op.answer.Is(model.UnknownPolicy) {
				for _, policy := range op.whole.policies {
					op.gone = op.gone || slices.ContainsFunc(h.gone[policy], func(p period) bool { return p.overlaps(op) })
				}
			}
			op.met = op.IdempotencyKey != "" && slices.ContainsFunc(granted[op.IdempotencyKey], func(g *operation) bool {
				return g != op && (op.batch == 0 || op.batch != g.batch) && (g.overlaps(op) || len(op.readings) > 1)
			})
		}
		histories = append(histories, of)
	}
	return histories
}

// rules are those by which an operation may have decided. An override that clean-up may have removed, because a
// clock was ahead, may be in force or not.
func (h *chronicle) rules(op *operation, of history) (all []rules) {
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
				return c.kind == cleansUp && c.called <= op.returned && slices.ContainsFunc(c.readings, func(now time.Time) bool { return !n.Live(now) })
			}) {
				add(v.Policy, nil, number)
			}
		}
	}
	return all
}

func (h *chronicle) now() time.Duration { return time.Since(h.started) }

func (h *chronicle) add(ops ...*operation) {
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
func (h *chronicle) define(random *rand.Rand, q *recorder, policy string) error {
	if isSlots(policy) {
		return h.defineSlots(random, q, policy)
	}
	p := model.Policy{
		Capacity: 3 + random.Int64N(10), Every: model.Micros(50 + random.Int64N(5000)), Stepped: policy[0] == 's',
		Durable: isDurable(policy), Remember: []model.Micros{kit.Day, kit.Day, 20_000, 2_000}[random.IntN(4)],
	}
	if random.IntN(8) == 0 {
		p.Stepped = !p.Stepped
	}
	p.Shadow = random.IntN(6) == 0
	if h.seed%4 == slowly {
		p.Every *= 1000
	}
	p.Refill = 1 + random.Int64N(p.Capacity)
	if random.IntN(8) == 0 {
		p.Refill = 0
	}
	if isQuota(policy) {
		p.Calendar, p.Refill, p.Stepped = h.calendar(random), 0, false
	}
	since := h.now()
	var err error
	if isQuota(policy) {
		_, err = q.Exec(context.Background(), `
			select ratelimit_define_policy($1, $2, durable => $3, remember => $4, shadow => $5, period => make_interval(days => $6), anchor => $7)`,
			policy, p.Capacity, p.Durable, kit.IntervalOfDays(p.Remember), p.Shadow, p.Period.Days, p.Anchor)
	} else {
		_, err = q.Exec(context.Background(), "select ratelimit_define_policy($1, $2, $3, $4, $5, $6, $7, $8)",
			policy, p.Capacity, p.Refill, kit.IntervalOfDays(p.Every), p.Stepped, p.Durable, kit.IntervalOfDays(p.Remember), p.Shadow)
	}
	h.defined(policy, p, since)
	return err
}

// defined notes that a policy is another one from an instant on; the one before ends now.
func (h *chronicle) defined(policy string, p model.Policy, since time.Duration) {
	until := h.now()
	if before := h.versions[policy]; len(before) > 0 {
		before[len(before)-1].until = until
		h.changes++
	}
	h.versions[policy] = append(h.versions[policy], version{p, period{since, forever}})
}

// calendar has a turn while the calls are made.
func (h *chronicle) calendar(random *rand.Rand) model.Calendar {
	turn := time.Now().Add(time.Duration(random.Int64N(int64(40 * kit.Ms)))).Truncate(kit.Us).UTC()
	return model.Calendar{Period: model.Period{Days: 1 + random.IntN(3)}, Zone: "UTC", Anchor: turn}
}

// setNumbers notes that a bucket has an override, or none, from an instant on; the one before ends at another.
func (h *chronicle) setNumbers(b model.BucketID, override *model.Override, since, until time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	before := h.numbers[b]
	before[len(before)-1].until = until
	h.numbers[b] = append(before, numbers{override, period{since, forever}})
}

// An actor makes the calls of one client.
type actor struct {
	*chronicle
	*recorder
	client int
	random *rand.Rand
	strict bool // its transactions are REPEATABLE READ
}

func (a *actor) act() error {
	if a.mostly != nil && a.random.IntN(4) > 0 {
		return a.mostly(a)
	}
	switch n := a.random.IntN(100); {
	case n < 24:
		return a.acquire()
	case n < 34:
		return a.acquireMany()
	case n < 42:
		return a.acquireAll()
	case n < 48:
		return a.acquireManyWithSizes()
	case n < 66:
		return a.spend()
	case n < 71:
		return a.decide(peeks)
	case n < 75:
		return a.decide(refunds)
	case n < 76:
		return a.decide(pauses)
	case n < 79:
		return a.acquireAndGiveBack()
	case n < 90 && a.client < len(a.buckets): // a bucket has one client who sets its override, so that these follow each other
		return a.override(a.buckets[a.client])
	case n < 92:
		return a.decide(resets)
	case n < 95 || a.client > 0:
		return a.cleanUp()
	case n < 97:
		return a.drop()
	default:
		return a.change()
	}
}

func (a *actor) change() error { return a.define(a.random, a.recorder, a.bucket().Policy) }

func (a *actor) bucket() model.BucketID { return a.buckets[a.random.IntN(len(a.buckets))] }

func (a *actor) operation(kind string, bucket model.BucketID) *operation {
	return &operation{kind: kind, Request: kit.Request{BucketID: bucket}, client: a.client, called: a.now()}
}

// request is an acquire, mostly of few tokens. A repeated idempotency key seldom has another cost.
func (a *actor) request(bucket model.BucketID) *operation {
	op := a.operation(acquires, bucket)
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

// sent makes the call, and records its answer. ratelimit_enforce is called through a function that makes a denial of its error.
func (op *operation) sent(q kit.Querier) error {
	name := "ratelimit_" + op.kind
	if op.enforced {
		name = "enforced"
	}
	return op.answered(kit.Ask(q, op.kind, name, op.args()))
}

// answered records an answer. Some errors are answers; others are returned.
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

// acquire, now and then in a transaction that may be rolled back.
func (a *actor) acquire() error {
	op := a.request(a.bucket())
	op.enforced = a.random.IntN(5) == 0
	return a.transact(func() error { return op.sent(a) }, op)
}

// transact makes the call of some operations, now and then in a transaction that may be rolled back.
func (a *actor) transact(call func() error, ops ...*operation) error {
	return kit.ErrorOf(a.transactIn(a.random.IntN(4) == 0, call, ops...))
}

func (a *actor) transactIn(held bool, call func() error, ops ...*operation) (committed bool, err error) {
	start, called := time.Now(), a.now()
	if held {
		begin := "begin"
		if a.strict {
			begin = "begin isolation level repeatable read"
		}
		if _, err := a.Exec(context.Background(), begin); err != nil {
			return false, err
		}
	}
	if err := call(); err != nil {
		if held {
			_, rollbackErr := a.Exec(context.Background(), "rollback")
			err = errors.Join(err, rollbackErr)
		}
		return false, err
	}
	read := a.recorder.readings.since(start)
	committed = true
	for _, op := range ops { // a transaction that met an error is aborted
		committed = committed && (!held || op.batch != 0 || op.answer == nil || op.answer.Error == "")
	}
	if held && a.random.IntN(3) == 0 && (len(ops) == 0 || ops[0].batch == 0) { // a batch that is undone has seen itself
		committed = false
	}
	if held {
		end := "commit"
		if !committed {
			end = "rollback"
		}
		if _, err := a.Exec(context.Background(), end); err != nil {
			return false, err
		}
	}
	returned := a.now()
	for _, op := range ops {
		op.called, op.returned, op.readings, op.undone = called, returned, read, !committed
		if op.kind == acquires && op.batch == 0 && op.denied() && !op.mayBeReplayed(op.answer) {
			before := 1 // the update, which may have waited
			if isQuota(op.Policy) {
				before = 2 // acquire's own, and that of the steps of a quota
			}
			op.readings = read[min(before, len(read)):]
		}
		// A round of decide_in_order after the first reads numbers when it has locked the buckets, and a batch that takes nothing
		// reads them with the buckets. Whatever else takes keeps to numbers from before. How often it reads the clock tells which it was.
		switch {
		case op.kind == shares && op.batch == 0: // two tries of ratelimit_acquire_all, and its batch
			op.reread = len(read) > 3+batchReadings+1
		case op.kind == shares:
			op.reread = len(read) > batchReadings+1 || !slices.ContainsFunc(ops, (*operation).takes)
		case op.batch != 0:
			first := firstReadings
			if !slices.ContainsFunc(ops, func(op *operation) bool { return op.IdempotencyKey != "" }) {
				first = plainReadings
			}
			op.reread = len(read) > first || !slices.ContainsFunc(ops, func(op *operation) bool { return op.takes() || op.answer.Taken > 0 })
		}
	}
	for _, op := range ops {
		if ops[0].then != op && (op.answer != nil || op.kind == resets || op.kind == cleansUp) { // but what is a part of another, or was not called
			a.add(op)
		}
	}
	return committed, nil
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
	c := newChronicler(kit.NewDB(t), "durable", "ephemeral")
	for call, readings := range map[string]int{
		"select ratelimit_acquire_many('{durable,ephemeral}', '{a,b}')":                            plainReadings,
		"select ratelimit_acquire_many('{durable,durable}', '{c,d}', idempotency_keys => '{1,2}')": firstReadings,
		"select ratelimit_acquire_many('{durable,ephemeral}', '{e,f}', sizes => '{2}')":            firstReadings,
	} {
		r := c.clients[0]
		r.readings.forget()
		require.NoError(t, kit.ErrorOf(r.Exec(t.Context(), call)))
		require.Len(t, r.readings.all, readings, call)
	}
}

// spend charges, settles, reserves, or takes what there is; now and then in a transaction that may be rolled back.
func (a *actor) spend() error {
	op := a.spending([]string{charges, settles, settles, reserves, reserves, takesAll}[a.random.IntN(6)], a.bucket())
	if err := a.transact(func() error { return op.sent(a) }, op); err != nil || op.kind != settles || op.answer.Decision == nil {
		return err
	}
	again := a.operation(settles, op.BucketID) // as if there had been no answer
	again.Cost, again.IdempotencyKey = op.Cost, op.IdempotencyKey
	return a.transact(func() error { return again.sent(a) }, again)
}

// reserveOn reserves until a bucket that refills slowly has nothing left.
func (a *actor) reserveOn() error {
	bucket := a.bucket()
	for range 6 {
		op := a.operation(reserves, bucket)
		op.Cost, op.maxWait = 3, 20*1_000_000
		if err := a.transact(func() error { return op.sent(a) }, op); err != nil {
			return err
		}
	}
	return nil
}

func (a *actor) reserve() error {
	op := a.spending(reserves, a.bucket())
	return a.transact(func() error { return op.sent(a) }, op)
}

// spending is one call, mostly about few tokens. Those with a key have the costs of others with this key, but settles have not.
func (a *actor) spending(kind string, bucket model.BucketID) *operation {
	op := a.request(bucket)
	op.kind = kind
	switch kind {
	case settles:
		op.Cost = a.random.Int64N(8)
		if op.IdempotencyKey == "" {
			op.IdempotencyKey = strconv.FormatInt(a.random.Int64N(4), 10)
		}
	case reserves:
		op.maxWait = model.Micros(a.random.Int64N(8000))
	case takesAll:
		op.atLeast = 1 + a.random.Int64N(3)
		op.Cost = op.atLeast + a.random.Int64N(6)
	}
	return op
}

// acquireAndGiveBack refunds or settles what it took. It is one operation if the acquire locks the bucket.
func (a *actor) acquireAndGiveBack() error {
	op := a.request(a.bucket())
	back := a.operation(refunds, op.BucketID)
	back.Cost = a.random.Int64N(5)
	if op.IdempotencyKey != "" && a.random.IntN(2) == 0 {
		back.kind, back.IdempotencyKey = settles, op.IdempotencyKey
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
		return recordWhole(w, err, r, ops)
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
			op = a.request(a.bucket())
			op.IdempotencyKey = first.IdempotencyKey
			if op.IdempotencyKey != "" && a.random.IntN(10) > 0 {
				op.Cost = first.Cost
			}
		}
		op.kind, op.whole = shares, whole
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

// recordWhole records the answer of a request of several charges, unless it is an error that is no answer.
func recordWhole(w kit.Whole, err error, r kit.WholeRequest, ops []*operation) error {
	if e := errorAnswer(err); e != nil {
		return answeredWhole(kit.WholeAnswer{Error: e.Error}, r, ops)
	} else if err != nil {
		return err
	}
	return answeredWhole(kit.WholeAnswer{Whole: &w}, r, ops)
}

// answeredWhole records the answer of a request of several charges. Elements of one bucket must have one answer, and
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

// override gives a bucket numbers of its own or takes them away, alone or in one transaction with a reset or an acquire.
func (a *actor) override(b model.BucketID) error {
	a.dropping.RLock()
	defer a.dropping.RUnlock()
	if a.random.IntN(4) == 0 {
		called := a.now()
		_, err := a.Exec(context.Background(), "select ratelimit_remove_override($1, $2)", b.Policy, b.Key)
		a.setNumbers(b, nil, called, a.now())
		return err
	}
	o := &model.Override{Capacity: a.random.Int64N(14), Every: model.Micros(50 + a.random.Int64N(5000))}
	o.Refill = a.random.Int64N(o.Capacity + 1)
	if a.seed%4 == slowlyOverridden {
		o.Every *= 1000
	}
	if isQuota(b.Policy) {
		calendar := a.calendar(a.random)
		o.Refill, o.Every, o.Zone, o.Anchor = 0, 0, calendar.Zone, calendar.Anchor
	}
	if isSlots(b.Policy) {
		*o = model.Override{Capacity: a.random.Int64N(5), Lease: a.lease(a.random)}
	}
	if a.random.IntN(3) == 0 {
		o.Expires = time.Now().Add(12*kit.Ms + time.Duration(a.random.Int64N(int64(20*kit.Ms)))).Truncate(kit.Us).UTC() // no clock is that far ahead
	}
	var ops []*operation
	a.mu.Lock()
	number := len(a.numbers[b])
	a.mu.Unlock()
	kind := a.random.IntN(4)
	if isSlots(b.Policy) && kind > 0 {
		kind = 3
	}
	switch kind {
	case 0:
		ops = append(ops, a.operation(resets, b))
	case 1, 2:
		ops = append(ops, a.request(b))
		ops[0].own = &rules{override: o, number: number}
	}
	called := a.now()
	committed, err := a.transactIn(len(ops) > 0 || a.random.IntN(4) == 0, func() error {
		var expires *time.Time
		if !o.Expires.IsZero() {
			expires = &o.Expires
		}
		var err error
		switch {
		case isSlots(b.Policy):
			_, err = a.Exec(context.Background(), "select ratelimit_override($1, $2, $3, expires_at => $4, lease => $5)",
				b.Policy, b.Key, o.Capacity, expires, kit.IntervalOfDays(o.Lease))
		case isQuota(b.Policy):
			_, err = a.Exec(context.Background(), "select ratelimit_override($1, $2, $3, expires_at => $4, time_zone => $5, anchor => $6)",
				b.Policy, b.Key, o.Capacity, expires, o.Zone, o.Anchor)
		default:
			_, err = a.Exec(context.Background(), "select ratelimit_override($1, $2, $3, $4, $5, $6)",
				b.Policy, b.Key, o.Capacity, o.Refill, kit.IntervalOfDays(o.Every), expires)
		}
		switch {
		case err != nil || kind == 3:
			return err
		case kind == 0:
			return kit.ErrorOf(a.Exec(context.Background(), "select ratelimit_reset($1, $2)", b.Policy, b.Key))
		}
		return ops[0].sent(a)
	}, ops...)
	switch {
	case kit.SQLState(err) == string(model.InvalidArgument) && !o.Expires.IsZero(): // too late
		return nil
	case committed:
		a.setNumbers(b, o, called, a.now())
		a.mu.Lock()
		a.chronicler.overrides++
		a.mu.Unlock()
		if len(ops) > 0 && (kind == 0 || ops[0].takes()) {
			ops[0].sets = number
		}
	}
	return err
}

// drop drops a policy and defines it anew.
func (a *actor) drop() error {
	a.dropping.Lock()
	defer a.dropping.Unlock()
	policy := a.bucket().Policy
	called := a.now()
	at := period{called, called}
	held := a.random.IntN(2) == 0
	var err error
	do := func(sql string, args ...any) {
		if err == nil {
			err = kit.ErrorOf(a.Exec(context.Background(), sql, args...))
		}
	}
	if held {
		do("begin")
	}
	do("select ratelimit_drop_policy($1)", policy)
	at.until = a.now()
	if err == nil {
		err = a.define(a.random, a.recorder, policy)
	}
	do(overrideSomeKey, policy)
	if held {
		do("commit")
		at.until = a.now()
	}
	if err != nil {
		return err
	}
	until := a.now()
	versions := a.versions[policy]
	versions[len(versions)-2].until = until
	versions[len(versions)-1].since = called
	a.gone[policy] = append(a.gone[policy], period{called, until})
	a.chronicler.drops++
	for _, b := range a.buckets {
		if b.Policy != policy {
			continue
		}
		op := a.operation(drops, b)
		op.called, op.returned = called, at.until
		a.add(op)
		a.setNumbers(b, nil, called, at.until)
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
		requests = append(requests, op.Nullable())
	}
	return a.transact(func() error {
		answers, err := kit.AcquireMany(a, requests)
		for i, r := range answers {
			ops[i].answer = &r
		}
		return err
	}, ops...)
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
		d, err = ops[0].By(ctx, a.combiner)
		err = ops[0].answered(kit.Answer{Decision: new(kit.DecisionOf(d))}, err)
	} else {
		var r kit.WholeRequest
		var w kit.Whole
		r, ops = a.wholeRequest(3)
		w, err = r.By(ctx, a.combiner)
		err = recordWhole(w, err, r, ops)
		for _, op := range ops {
			op.called = called // not reread: others in its call may have taken, and kept to what they had read
		}
	}
	for _, op := range ops {
		op.returned, op.readings = a.now(), a.chronicler.readings.since(start)
	}
	if err != nil {
		return err
	}
	a.add(ops...)
	return nil
}

// decide makes a call that asks for few tokens, or stops a bucket for some milliseconds.
func (a *actor) decide(kind string) error {
	op := a.operation(kind, a.bucket())
	op.Cost, op.maxWait = a.random.Int64N(5), model.Micros(1_000+a.random.IntN(10_000))
	return a.transact(func() error { return op.sent(a) }, op)
}

func (a *actor) cleanUp() error {
	var ops []*operation
	for _, b := range a.buckets {
		ops = append(ops, a.operation(cleansUp, b))
	}
	return a.transact(func() error { return kit.ErrorOf(a.Exec(context.Background(), "select ratelimit_cleanup()")) }, ops...)
}
