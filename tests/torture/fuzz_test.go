package torture

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/stretchr/testify/require"
)

// Every public function is called with whatever the protocol can carry. Each response must be the one that an oracle predicts, to
// the SQLSTATE and the message: a refusal, in the order in which the functions check, or the decision of the model, field by
// field. After each round the tables must hold what the model holds, and refused calls must have changed nothing.
//
// A round depends on its seed alone.
func TestTorture_Fuzz(t *testing.T) {
	run := kit.Torture(t, 10)
	inputs := newTally()
	var next atomic.Uint64
	next.Store(kit.FirstSeed(t))
	var failed sync.Once
	var workers sync.WaitGroup
	for range 4 {
		f := newFuzzer(t, inputs)
		workers.Go(func() {
			for run.GoesOn() && !t.Failed() {
				seed := next.Add(1) - 1
				if err := f.round(seed); err != nil {
					failed.Do(func() { t.Errorf("%v\n%s", err, kit.Repeats(t, seed)) })
				}
				run.Progress("%d inputs", inputs.total())
			}
		})
	}
	workers.Wait()
	require.Empty(t, inputs.lacks())
	run.Counts(inputs.counts)
}

// A checker that has never failed proves nothing: each of these bugs must be found.
func TestFuzz_FindsPlantedBugs(t *testing.T) {
	pgtest.OncePerServer(t)
	kit.InParallel(t, map[string]plantedBug{
		"a key of 513 bytes":      {"ratelimit.is_name", `octet_length\(value\) between 1 and 512`, `octet_length(value) between 1 and 513`},
		"a month in an interval":  {"ratelimit.check_span", `or extract\(month from value\) <> 0`, ``},
		"a cost checked too late": {"ratelimit_peek", `acceptable\(key, cost\)`, `is_name(key)`},
		"an internal error":       {"ratelimit.refuse", `errcode = '22023'`, `errcode = 'XX000'`},
		"an error that leaves something done": {"ratelimit.decide_in_order",
			`if v_verdict\.refused is not null then`, `$0 update buckets set level = 0;`},
		"a token too many":                    {"ratelimit_refund", `least\(amount, v_policy.capacity\)`, `least(amount + 1, v_policy.capacity)`},
		"a cost of 0 slots":                   {"ratelimit_hold", `cost >= 1`, `cost >= 0`},
		"a renewal of a lease that has ended": {"ratelimit_renew", `and l\.ends_at > v_now; end if;`, `; end if;`},
		"a release of all holders":            {"ratelimit_release", `and l\.holder = v_holder and l\.ends_at`, `and l.ends_at`},
		"a policy that stays": {"ratelimit_drop_policy",
			`delete from policies as p where p.name = v_name returning p.id`, `update policies as p set name = p.name where p.name = v_name returning p.id`},
	}, func(t *testing.T, bug plantedBug) {
		f := newFuzzer(t, newTally())
		bug.plant(f.db)
		seed := kit.TestSeed(t)
		for n := range uint64(200) {
			if f.round(seed+n) != nil {
				t.Logf("found in round %d", n+1)
				return
			}
		}
		t.Error("it is not found in 200 rounds")
	})
}

// A fuzzer has a database of its own.
type fuzzer struct {
	db       *kit.TestDB
	wire     *kit.Wire
	inputs   *tally
	version  string
	setClock string // a statement, with the microseconds of the Unix epoch for %d
	citus    bool   // a request of several keys is refused, and the rows of a dropped policy are left to clean-up
}

func newFuzzer(t *testing.T, inputs *tally) *fuzzer {
	db := kit.NewDB(t)
	db.ClockPerSession()
	f := &fuzzer{db: db, inputs: inputs, setClock: "set test.now = %d"}
	f.begin(t)
	return f
}

// begin connects, and prepares the statements.
func (f *fuzzer) begin(t *testing.T) {
	f.wire = f.db.Wire(t)
	setup := []kit.Message{simple("set synchronous_commit = off"), simple("select ratelimit_version()")}
	for name, function := range fuzzFunctions {
		setup = append(setup, prepare(name, function.statement(name)))
	}
	responses := kit.NoError(f.wire.Ask(setup))(t)
	for _, r := range responses {
		require.Empty(t, r.Code, r)
	}
	f.version = responses[1].Rows[0]
}

const (
	// fuzzPacked is what the arrays say, each number of an element or a request once.
	fuzzPacked = `
		with p as materialized (select * from @)
		select r.* from p cross join lateral (
		  select 'arrays', 0::bigint, format('%s|%s', p.replayed is null, p.shadowed is null)
		  union all
		  select 'element', u.n, format('%s|%s|%s|%s|%s|%s|%s', coalesce(u.retry_after = 0, false), u.remaining, u.retry_after, u.reset_after,
		                                u.capacity, coalesce(u.replayed, false), coalesce(u.shadowed, false))
		    from unnest(p.elements, p.remaining, p.retry_after_us, p.reset_after_us, p.capacity, p.replayed, p.shadowed)
		         as u (n, remaining, retry_after, reset_after, capacity, replayed, shadowed)
		  union all
		  select 'refused', u.n, format('%s|%s', u.code, case when u.code <> '22023' then u.message end)
		    from unnest(p.refused, p.error_codes, p.error_messages) as u (n, code, message)
		  union all
		  select 'request', u.n, format('%s|%s|%s|%s', u.allowed, u.replayed, u.shadowed, u.binding)
		    from unnest(p.requests, p.requests_allowed, p.requests_replayed, p.requests_shadowed, p.bindings)
		         as u (n, allowed, replayed, shadowed, binding)) as r (kind, n, answer)
		 order by r.kind, r.n`

	stateQuery = `
		select coalesce(sum(hashtextextended(t, 0)::numeric), 0)
		  from (select p::text from ratelimit.policies as p
		        union all select 'o' || o::text from ratelimit.overrides as o
		        union all select 'b' || b::text from ratelimit.buckets as b
		        union all select 'e' || b::text from ratelimit.ephemeral_buckets as b
		        union all select 's' || s::text from (table ratelimit.slots union all table ratelimit.ephemeral_slots) as s
		        union all select 'h' || l::text from (table ratelimit.leases union all table ratelimit.ephemeral_leases) as l
		        union all select 'k' || k::text from ratelimit.idempotency_keys as k
		        union all select 'l' || k::text from ratelimit.ephemeral_idempotency_keys as k) as all_rows (t)`

	countQuery = `
		select (select count(*) from ratelimit.policies),
		       (select count(*) from ratelimit.buckets) + (select count(*) from ratelimit.ephemeral_buckets),
		       (select count(*) from ratelimit.idempotency_keys) + (select count(*) from ratelimit.ephemeral_idempotency_keys),
		       (select count(*) from ratelimit.overrides),
		       (select count(*) from ratelimit_holders(null, null, 1000000))`
)

// A fuzzedFunction is a public function as the fuzzer calls it.
type fuzzedFunction struct {
	often     int    // in proportion to the others
	columns   string // that are compared; or the whole statement, with @ for the call
	arguments string // their kinds, as kinds has them
}

// statement is the SQL of a call, with as many parameters as the function has arguments.
func (f fuzzedFunction) statement(name string) string {
	var parameters []string
	for i := range strings.Fields(f.arguments) {
		parameters = append(parameters, fmt.Sprintf("$%d", i+1))
	}
	statement := f.columns
	if !strings.Contains(statement, "@") {
		statement = "select " + statement + " from @"
	}
	return strings.Replace(statement, "@", name+"("+strings.Join(parameters, ", ")+")", 1)
}

// us are the microseconds of an interval or an instant.
func us(column string) string { return "(extract(epoch from " + column + ") * 1000000)::bigint" }

var (
	fuzzDecision = "allowed, remaining, " + us("retry_after") + ", " + us("reset_after") + ", capacity, replayed, shadowed"

	fuzzDecisions = fuzzDecision + `,
		binding,
		(select string_agg(format('%s|%s|%s|%s|%s|%s|%s', d.allowed, d.remaining, ` + us("d.retry_after") + ", " + us("d.reset_after") + `,
		                          d.capacity, d.replayed, d.shadowed), '; ' order by d.n)
		   from unnest(decisions) with ordinality as d (allowed, remaining, retry_after, reset_after, capacity, replayed, shadowed, n))`
)

var fuzzFunctions = map[string]fuzzedFunction{
	"ratelimit_define_policy":   {2, "", "policy capacity refill every stepped durable every shadow"},
	"ratelimit_drop_policy":     {1, "", "policy"},
	"ratelimit_policies":        {1, "policy, capacity, refill, " + us("every") + ", stepped, durable, " + us("remember") + ", shadow", ""},
	"ratelimit_override":        {2, "", "policy key capacity? refill? every? expires?"},
	"ratelimit_remove_override": {1, "*", "policy key"},
	"ratelimit_overrides":       {1, "policy, key, capacity, refill, " + us("every") + ", " + us("nullif(expires_at, 'infinity')"), "policy? key? rows"},
	"ratelimit_acquire":         {3, fuzzDecision, "policy key cost once"},
	"ratelimit_enforce":         {1, fuzzDecision, "policy key capacity once"}, // which is denied now and then
	"ratelimit_acquire_many":    {3, "request, error_code, case when error_code <> '22023' then error_message end, " + fuzzDecisions, "policy[] key[] cost[]? once[]? sizes"},
	"ratelimit_acquire_all":     {2, fuzzDecisions, "policy[] key[] cost[]? once"},
	"ratelimit_acquire_packed":  {2, fuzzPacked, "policy[] key[] cost[]? sizes once[]?"},
	"ratelimit_peek":            {2, fuzzDecision, "policy key cost"},
	"ratelimit_refund":          {2, fuzzDecision, "policy key cost"},
	"ratelimit_pause":           {1, fuzzDecision, "policy key wait"},
	"ratelimit_charge":          {2, fuzzDecision, "policy key cost once"},
	"ratelimit_settle":          {2, fuzzDecision, "policy key key cost"},
	"ratelimit_reserve":         {2, strings.Replace(fuzzDecision, "retry_after", "wait", 1), "policy key wait cost once"},

	"ratelimit_acquire_up_to": {2, fuzzDecision + ", taken", "policy key at_most at_least once"},

	"ratelimit_hold":        {3, "allowed, remaining, " + us("retry_after") + ", " + us("held_for") + ", capacity, renewed, shadowed", "lends held key slots"},
	"ratelimit_renew":       {1, us("ratelimit_renew"), "lends held key"},
	"ratelimit_release":     {1, "*", "lends held key"},
	"ratelimit_holders":     {1, "policy, key, holder, cost, " + us("held_for"), "lends? key? rows"},
	"ratelimit_status":      {1, "policy, key, remaining, " + us("retry_after") + ", " + us("reset_after") + ", capacity, overridden", "policy? rows key?"},
	"ratelimit_doctor":      {1, "count(*) >= 0", ""},
	"ratelimit_reset":       {1, "", "policy key"},
	"ratelimit_reset_all":   {1, "call @", "policy"},
	"ratelimit_cleanup":     {1, "buckets_deleted >= 0, idempotency_keys_deleted >= 0", "max_rows"},
	"ratelimit_cleanup_all": {1, "call @", "budget"},
	"ratelimit_version":     {1, "*", ""},
	"ratelimit_shard":       {1, "shard, of", ""},
}

// fuzzNames has each function as often as it is called. Those that take an argument can refuse it.
var fuzzNames, refusing = func() (all, refusing []string) {
	for _, name := range slices.Sorted(maps.Keys(fuzzFunctions)) {
		f := fuzzFunctions[name]
		all = append(all, slices.Repeat([]string{name}, f.often)...)
		if f.arguments != "" {
			refusing = append(refusing, slices.Repeat([]string{name}, f.often)...)
		}
	}
	return all, refusing
}()

// A fuzzCall is a call and the response that it must get.
type fuzzCall struct {
	function string // empty: a query of the test's own
	args     []argument
	requests []string // of a batch that gets as far as them: the SQLSTATE of each

	codes   []string // one of these; none: the rows
	message string   // of the refusal, when it is the package's
	rows    []string
}

func (c *fuzzCall) String() string {
	args := make([]string, len(c.args))
	for i, a := range c.args {
		args[i] = fmt.Sprintf("%.600q", a.text)
		if a.text == nil {
			args[i] = "null"
		}
	}
	return fmt.Sprintf("%s(%s)", c.function, strings.Join(args, ", "))
}

// verify compares a response with the expected one.
func (c *fuzzCall) verify(r kit.Response) error {
	switch {
	case len(c.codes) > 0 && (!slices.Contains(c.codes, r.Code) || c.message != "" && c.message != r.Message):
		return fmt.Errorf("%v: %.300v instead of %s %s", c, r, strings.Join(c.codes, " or "), c.message)
	case len(c.codes) == 0 && (r.Code != "" || len(r.Rows) != len(c.rows)):
		return fmt.Errorf("%v: %.300v instead of %d rows", c, r, len(c.rows))
	case len(c.codes) == 0:
		for i, row := range c.rows {
			if r.Rows[i] != row {
				return fmt.Errorf("%v: %q instead of %q", c, r.Rows[i], row)
			}
		}
	}
	return nil
}

// A round is some hundred calls on policies of its own, sent together by one protocol.
type round struct {
	fuzzed
	model  *model.Model
	now    time.Time
	fuzzer *fuzzer
	known  map[string]bool // the policies that are defined
	names  []string        // of policies that refill
	lends  string          // the policy that lends slots: no other function than theirs is called on it
	keys   []string
	binary bool     // the extended protocol
	batch  []string // the SQLSTATEs of the batch that was answered last

	version  string
	calls    []fuzzCall
	messages []kit.Message
}

func (f *fuzzer) round(seed uint64) error {
	random := fuzzed{rand.New(rand.NewPCG(seed, 0))}
	r := &round{fuzzed: random, model: model.New(), now: kit.T0, fuzzer: f, known: map[string]bool{}, binary: seed%2 == 0, version: f.version}
	for range 4 {
		r.names = append(r.names, r.name())
		r.keys = append(r.keys, r.name())
	}
	r.passTime()
	if err := r.lend(); err != nil {
		return err
	}
	for _, name := range r.names[:3] {
		args := r.arguments("ratelimit_define_policy", func() bool { return true })
		args[0] = textArgument(name)
		r.add("ratelimit_define_policy", args)
	}

	for _, name := range r.names[:3] { // denials, but for shadows; too seldom to be left to chance
		r.add("ratelimit_enforce", []argument{textArgument(name), textArgument(r.keys[0]), bigintArgument(kit.MaxTokens), null})
	}
	for _, name := range r.names[:3] { // a repeat after its settlement: likewise
		policy, key, repeated := textArgument(name), textArgument(r.keys[0]), textArgument("settled")
		r.add("ratelimit_charge", []argument{policy, key, bigintArgument(1), repeated})
		r.add("ratelimit_settle", []argument{policy, key, repeated, bigintArgument(1)})
		r.add("ratelimit_acquire", []argument{policy, key, bigintArgument(1), repeated})
	}
	for range 8 { // no number as text, nor with a byte too many
		bad := argument{text: []byte("x"), binary: make([]byte, 9), unreadable: slices.Concat(unreadable.number, unreadable.binary)}
		r.add("ratelimit_peek", []argument{textArgument(r.names[0]), textArgument(r.keys[0]), bad})
	}

	for range 400 {
		if r.oneIn(10) {
			r.passTime()
		}
		function := oneOf(random, fuzzNames)
		r.add(function, r.callOf(function, strings.HasPrefix(function, "ratelimit_cleanup"))) // where clean-up has its turn: see below
	}
	for _, id := range r.buckets() {
		r.add("ratelimit_peek", []argument{textArgument(id.Policy), textArgument(id.Key), bigintArgument(1)})
	}
	count := countQuery
	if f.citus {
		count = strings.NewReplacer("buckets)", "buckets where policy_id in (select id from ratelimit.policies))",
			"_keys)", "_keys where policy_id in (select id from ratelimit.policies))").Replace(count)
	}
	r.look(count, fmt.Sprintf("%d|%d|%d|%d|%d", len(r.known), len(r.model.Buckets()), r.model.Grants(), len(r.model.Overrides()),
		len(r.model.Holders(r.now, nil, nil))))

	before := r.look(stateQuery)
	for range 100 {
		function := oneOf(random, refusing)
		r.add(function, r.callOf(function, true))
	}
	after := r.look(stateQuery)

	// Clean-up may take any bucket that is full, so nothing is asked of buckets afterwards.
	for range 2 {
		r.add("ratelimit_cleanup", []argument{integerArgument(max(1, int32(r.integer())))})
		budget := oneOf(random, []span{{micros: 1}, {days: 1, micros: -1}, {months: 1}, {months: math.MaxInt32, days: math.MaxInt32}})
		r.add("ratelimit_cleanup_all", []argument{spanArgument(budget)})
	}
	for _, name := range slices.Sorted(maps.Keys(r.known)) {
		r.add("ratelimit_drop_policy", []argument{textArgument(name)})
	}
	if f.citus {
		r.look("call ratelimit_cleanup_all()")
	}
	r.look(countQuery, "0|0|0|0|0")

	responses, err := f.wire.Ask(r.messages)
	if err != nil {
		return err
	}
	for i, c := range r.calls {
		if c.function == "" && c.rows == nil && responses[i].Code == "" {
			continue
		}
		if err := c.verify(responses[i]); err != nil {
			return err
		}
	}
	if b, a := responses[before], responses[after]; b.Code != "" || !slices.Equal(b.Rows, a.Rows) {
		return fmt.Errorf("refused calls changed the state from %v to %v", b, a)
	}
	f.inputs.add(r, responses)
	return nil
}

// send adds a message and the response that it must get.
func (r *round) send(m kit.Message, c fuzzCall) int {
	r.messages = append(r.messages, m)
	r.calls = append(r.calls, c)
	return len(r.calls) - 1
}

// look adds a query of the test's own. Without rows its result is not compared here.
func (r *round) look(sql string, rows ...string) int {
	return r.send(simple(sql), fuzzCall{rows: rows})
}

// lend defines the policy that lends slots.
func (r *round) lend() error {
	r.lends = "slots " + r.unicode(40)
	capacity, lease := 1+r.Int64N(8), model.Micros(1000+r.Int64N(1<<r.IntN(48)))
	durable, shadow := r.oneIn(2), r.oneIn(4)
	name := r.literal(textArgument(r.lends))
	r.look(fmt.Sprintf("select from ratelimit_define_policy(%s, %d, lease => '%d us', durable => %t, shadow => %t)", name, capacity, lease, durable, shadow), "")
	r.known[r.lends] = true
	return r.model.Define(r.lends, model.Definition{Numbers: model.Numbers{Capacity: &capacity, Lease: &lease}, Durable: &durable, Shadow: &shadow})
}

// passTime moves the clock, forwards more often than not.
func (r *round) passTime() {
	steps := []int64{0, 1, 1000, 1_000_000, 60_000_000, 3_600_000_000, kit.Day, 365 * kit.Day}
	step := model.Micros(r.Int64N(1 + oneOf(r.fuzzed, steps)))
	if r.oneIn(5) {
		step = -step
	}
	if r.now = step.After(r.now); r.now.Sub(kit.T0).Abs() > 100*365*24*time.Hour {
		r.now = kit.T0
	}
	r.look(fmt.Sprintf(r.fuzzer.setClock, r.now.UnixMicro()))
}

// add foretells the answer to a call, and sends it.
func (r *round) add(function string, args []argument) {
	c := fuzzCall{function: function, args: args}
	for _, a := range args {
		c.codes = append(c.codes, a.unreadable...)
	}
	if len(c.codes) == 0 {
		err := r.check(function, args)
		if err == nil {
			r.batch = nil
			c.rows, err = r.answer(function, args)
			c.requests = r.batch
		}
		if err != nil {
			code, message := refused(err)
			c.codes, c.message = []string{code}, message
		}
	}

	statement := fuzzFunctions[function].statement(function)
	if !r.binary {
		var sql strings.Builder
		rest := statement
		for i, a := range args {
			before, after, _ := strings.Cut(rest, fmt.Sprintf("$%d", i+1))
			sql.WriteString(before)
			sql.WriteString(r.literal(a))
			rest = after
		}
		r.send(simple(sql.String()+rest), c)
		return
	}
	formats, parameters := make([]int16, len(args)), make([][]byte, len(args))
	for i, a := range args {
		if parameters[i] = a.text; a.binary != nil && r.oneIn(2) {
			formats[i], parameters[i] = 1, a.binary
		}
	}
	m := extended(function, formats, parameters)
	if r.oneIn(16) {
		m = append(kit.Message{&pgproto3.Parse{Query: statement}}, extended("", formats, parameters)...)
	}
	r.send(m, c)
}

// literal writes an argument in one of the ways that SQL has.
func (r *round) literal(a argument) string {
	s := string(a.text)
	switch n, isNumber := a.value.(int64); {
	case a.text == nil:
		return "null"
	case isNumber && 0 <= n && n <= math.MaxInt32 && r.oneIn(2):
		return s
	case !strings.Contains(s, "$") && r.oneIn(3):
		return "$q$" + s + "$q$"
	case r.oneIn(2):
		return "E'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s) + "'"
	}
	return "'" + strings.ReplaceAll(s, "'", "''") + "'"
}

// callOf makes arguments: all good, or each of them good more often than not.
func (r *round) callOf(function string, refusedOnly bool) []argument {
	for {
		allGood := !refusedOnly && r.oneIn(3)
		args := r.arguments(function, func() bool { return allGood || !r.oneIn(4) })
		if !refusedOnly || slices.ContainsFunc(args, func(a argument) bool { return len(a.unreadable) > 0 }) || r.check(function, args) != nil {
			return args
		}
	}
}

func (r *round) arguments(function string, good func() bool) []argument {
	d := &drawing{round: r, good: good, keys: r.keys, least: 1 + r.Int64N(3)}
	if r.fuzzer.citus && r.oneIn(2) { // so that a request has one key more often than not
		d.keys = []string{oneOf(r.fuzzed, r.keys)}
	}
	switch function {
	case "ratelimit_acquire_all":
		d.elements = 1 + r.IntN(6)
		if !good() {
			d.elements = oneOf(r.fuzzed, []int{0, 1, 7, 30, 1000, 1001})
		}
	case "ratelimit_acquire_many", "ratelimit_acquire_packed":
		d.drawSizes(r.oneIn(2))
	default:
		d.elements = r.IntN(1 << r.IntN(8))
	}
	for {
		var args []argument
		for _, kind := range strings.Fields(fuzzFunctions[function].arguments) {
			args = append(args, d.argument(kind))
		}
		if function != "ratelimit_define_policy" || !good() || r.check(function, args) == nil { // a good one also fills in time
			return args
		}
	}
}

// A drawing is of the arguments of one call.
type drawing struct {
	*round
	good               func() bool
	keys               []string
	least              int64 // of acquire_up_to
	elements, requests int   // of a batch
	sizes              argument
}

// argument draws one of a kind, or by chance any of its type. Of a kind with a question mark it may be null.
func (d *drawing) argument(kind string) argument {
	if of, nullable := strings.CutSuffix(kind, "?"); nullable {
		if d.oneIn(3) {
			return null
		}
		return d.argument(of)
	}
	if of, isArray := strings.CutSuffix(kind, "[]"); isArray {
		return d.array(of)
	}
	switch kind {
	case "sizes":
		return d.sizes
	case "once":
		if d.oneIn(2) {
			return null
		}
		return d.argument("key")
	}
	if d.good() {
		return kinds[kind].good(d)
	}
	return kinds[kind].any(d)
}

// kinds of arguments have a good one drawn, and any of their type.
var kinds = map[string]struct{ good, any func(d *drawing) argument }{
	"policy": {func(d *drawing) argument { return textArgument(oneOf(d.fuzzed, d.names)) }, (*drawing).anyText},
	"lends": {func(d *drawing) argument {
		return textArgument(oneOf(d.fuzzed, []string{d.lends, d.lends, d.lends, d.lends, d.lends, d.names[0]}))
	}, (*drawing).anyText},
	"key":      {func(d *drawing) argument { return textArgument(oneOf(d.fuzzed, d.keys)) }, (*drawing).anyText},
	"held":     {func(d *drawing) argument { return textArgument(d.keys[0]) }, (*drawing).anyText},
	"cost":     {func(d *drawing) argument { return bigintArgument(d.Int64N(4)) }, (*drawing).anyBigint},
	"slots":    {func(d *drawing) argument { return bigintArgument(1 + d.Int64N(3)) }, (*drawing).anyBigint},
	"at_most":  {func(d *drawing) argument { return bigintArgument(d.least + d.Int64N(1<<d.IntN(44))) }, (*drawing).anyBigint},
	"at_least": {func(d *drawing) argument { return bigintArgument(d.least) }, (*drawing).anyBigint},
	"capacity": {func(d *drawing) argument { return bigintArgument(d.Int64N(1 << d.IntN(44))) }, (*drawing).anyBigint},
	"refill": {func(d *drawing) argument {
		return bigintArgument(int64(min(1, d.IntN(8))) * (1 + d.Int64N(1<<d.IntN(44))))
	}, (*drawing).anyBigint},
	"every": {func(d *drawing) argument { return spanArgument(span{micros: 1 + d.Int64N(1<<d.IntN(55))}) }, (*drawing).anySpan},
	"wait": {func(d *drawing) argument {
		return spanArgument(span{days: int32(d.IntN(2)), micros: d.Int64N(min(364*kit.Day, int64(1)<<d.IntN(45)))})
	}, (*drawing).anySpan},
	"expires": {func(d *drawing) argument {
		return instantArgument((1 + model.Micros(d.Int64N(1<<d.IntN(55)))).After(d.now).UnixMicro())
	}, func(d *drawing) argument { return d.anyInstant(d.now) }},
	"stepped":  {func(d *drawing) argument { return booleanArgument(d.oneIn(2)) }, (*drawing).anyBoolean},
	"durable":  {func(*drawing) argument { return null }, (*drawing).anyBoolean},
	"shadow":   {func(d *drawing) argument { return booleanArgument(d.oneIn(4)) }, (*drawing).anyBoolean},
	"rows":     {func(d *drawing) argument { return integerArgument(1 + int32(d.IntN(20))) }, (*drawing).anyInteger},
	"max_rows": {(*drawing).anyInteger, (*drawing).anyInteger},
	"budget":   {(*drawing).anySpan, (*drawing).anySpan},
}

// array draws one of a batch, with an element for each charge, or for each request. A bad one is null, no array, or of another length.
func (d *drawing) array(of string) argument {
	length := d.elements
	if of == "once" {
		length = d.requests
	}
	if !d.good() {
		switch d.IntN(12) {
		case 0:
			return null
		case 1:
			return d.noArray()
		case 2:
			length = d.IntN(1 << d.IntN(10))
		}
	}
	values := make([]argument, length)
	for i := range values {
		values[i] = d.argument(of)
		for len(values[i].unreadable) > 0 || len(values[i].text) > 2000 {
			values[i] = d.argument(of)
		}
	}
	if of == "cost" {
		return arrayArgument(pointers[int64](values), pgtype.Int8OID, values, d.shapeFor(length))
	}
	return arrayArgument(pointers[string](values), pgtype.TextOID, values, d.shapeFor(length))
}

// drawSizes draws the sizes of requests, whose sum is how many elements there are. Without sizes each element is a request.
func (d *drawing) drawSizes(without bool) {
	var sizes []argument
	for range d.IntN(1 << d.IntN(7)) {
		size := 1 + d.IntN(6)
		if !d.good() && d.oneIn(4) {
			size = oneOf(d.fuzzed, []int{0, 0, 30, 1001})
		}
		sizes = append(sizes, integerArgument(int32(size)))
		d.elements += size
	}
	if len(sizes) > 0 && !d.good() && d.oneIn(8) {
		sizes[d.IntN(len(sizes))] = oneOf(d.fuzzed, []argument{null, integerArgument(-1), integerArgument(math.MaxInt32)})
	}
	d.requests, d.sizes = len(sizes), arrayArgument(pointers[int64](sizes), pgtype.Int4OID, sizes, d.shapeFor(len(sizes)))
	switch {
	case without:
		d.requests, d.sizes = d.elements, null
	case !d.good():
		d.sizes = oneOf(d.fuzzed, []argument{null, d.noArray()})
	}
}

// pointers are the values of elements, nil for null.
func pointers[T any](elements []argument) []*T {
	values := make([]*T, len(elements))
	for i, e := range elements {
		values[i] = pointerTo[T](e.value)
	}
	return values
}

// name is an acceptable one.
func (r *round) name() string {
	for {
		if s, _ := r.anyText().value.(string); badName("", s) == nil && len(textArgument(s).unreadable) == 0 {
			return s
		}
	}
}

// buckets are those that were taken from, in one order.
func (r *round) buckets() []model.BucketID { return inOrder(r.model.Buckets()) }

func inOrder(ids []model.BucketID) []model.BucketID {
	return slices.SortedFunc(slices.Values(ids), func(a, b model.BucketID) int {
		return cmp.Or(strings.Compare(a.Policy, b.Policy), strings.Compare(a.Key, b.Key))
	})
}

// A tally counts inputs: a call is one, and a batch that gets as far as its requests is as many as those.
type tally struct {
	mu     sync.Mutex
	counts map[string]int // by the names of figures
}

func newTally() *tally { return &tally{counts: map[string]int{}} }

func (n *tally) add(r *round, responses []kit.Response) {
	protocol := map[bool]string{false: "simple", true: "extended"}[r.binary]
	n.mu.Lock()
	defer n.mu.Unlock()
	for i, c := range r.calls {
		if c.function == "" {
			continue
		}
		codes := c.requests
		if len(codes) == 0 {
			codes = []string{responses[i].Code}
		}
		for _, code := range codes {
			for _, what := range []string{"inputs", "by the " + protocol + " protocol", "to " + c.function, "answered with " + cmp.Or(code, "rows")} {
				n.counts[what]++
			}
		}
	}
}

func (n *tally) total() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.counts["inputs"]
}

// lacks names what no input has met yet.
func (n *tally) lacks() (missing []string) {
	for function := range fuzzFunctions {
		missing = append(missing, "to "+function)
	}
	for _, code := range []string{"rows", "22023", "RL001", "RL002", "RL003", "RL004", "RL429", "22021", "22P02", "22P03", "08P01"} {
		missing = append(missing, "answered with "+code)
	}
	return slices.DeleteFunc(missing, func(what string) bool { return n.counts[what] > 0 })
}
