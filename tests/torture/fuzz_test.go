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
	inputs.report(run)
}

// A checker that has never failed proves nothing: each of these bugs must be found.
func TestFuzz_FindsPlantedBugs(t *testing.T) {
	pgtest.OncePerServer(t)
	t.Parallel()
	for name, bug := range map[string]struct {
		kit.Mutation
		function string
	}{
		"a key of 513 bytes":                  {kit.Mutation{Pattern: `octet_length\(value\) between 1 and 512`, Replacement: `octet_length(value) between 1 and 513`}, "ratelimit.is_name"},
		"a month in an interval":              {kit.Mutation{Pattern: `or extract\(month from value\) <> 0`, Replacement: ``}, "ratelimit.check_span"},
		"a cost checked too late":             {kit.Mutation{Pattern: `acceptable\(key, cost\)`, Replacement: `is_name(key)`}, "ratelimit_peek"},
		"an internal error":                   {kit.Mutation{Pattern: `errcode = '22023'`, Replacement: `errcode = 'XX000'`}, "ratelimit.refuse"},
		"an error that leaves something done": {kit.Mutation{Pattern: `if v_verdict\.refused is not null then`, Replacement: `$0 update buckets set level = 0;`}, "ratelimit.decide_in_order"},
		"a token too many":                    {kit.Mutation{Pattern: `least\(amount, v_policy.capacity\)`, Replacement: `least(amount + 1, v_policy.capacity)`}, "ratelimit_refund"},
		"a cost of 0 slots":                   {kit.Mutation{Pattern: `cost >= 1`, Replacement: `cost >= 0`}, "ratelimit_hold"},
		"a renewal of a lease that has ended": {kit.Mutation{Pattern: `and l\.ends_at > v_now; end if;`, Replacement: `; end if;`}, "ratelimit_renew"},
		"a release of all holders":            {kit.Mutation{Pattern: `and l\.holder = v_holder and l\.ends_at`, Replacement: `and l.ends_at`}, "ratelimit_release"},
		"a policy that stays":                 {kit.Mutation{Pattern: `delete from policies as p where p.name = v_name returning p.id`, Replacement: `update policies as p set name = p.name where p.name = v_name returning p.id`}, "ratelimit_drop_policy"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFuzzer(t, newTally())
			f.db.Mutate(bug.Mutation, bug.function)
			seed := kit.TestSeed(t)
			for n := range uint64(200) {
				if f.round(seed+n) != nil {
					t.Logf("found in round %d", n+1)
					return
				}
			}
			t.Errorf("%s is not found in 200 rounds", name)
		})
	}
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
	for name, sql := range fuzzStatements {
		setup = append(setup, prepare(name, sql))
	}
	responses := kit.NoError(f.wire.Ask(setup))(t)
	for _, r := range responses {
		require.Empty(t, r.Code, r)
	}
	f.version = responses[1].Rows[0]
}

const (
	fuzzDecision = "select allowed, remaining, (extract(epoch from retry_after) * 1000000)::bigint, (extract(epoch from reset_after) * 1000000)::bigint, capacity, replayed, shadowed from "

	fuzzDecisions = `
		binding,
		(select string_agg(format('%s|%s|%s|%s|%s|%s|%s', d.allowed, d.remaining, (extract(epoch from d.retry_after) * 1000000)::bigint,
		                          (extract(epoch from d.reset_after) * 1000000)::bigint, d.capacity, d.replayed, d.shadowed), '; ' order by d.n)
		   from unnest(decisions) with ordinality as d (allowed, remaining, retry_after, reset_after, capacity, replayed, shadowed, n))`

	// fuzzPacked is what the arrays say, each number of an element or a request once.
	fuzzPacked = `
		with p as materialized (select * from ratelimit_acquire_packed($1, $2, $3, $4, $5))
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

// fuzzStatements has a call of each function, and the columns of its result that are compared.
var fuzzStatements = map[string]string{
	"ratelimit_define_policy": "select from ratelimit_define_policy($1, $2, $3, $4, $5, $6, $7, $8)",
	"ratelimit_drop_policy":   "select from ratelimit_drop_policy($1)",
	"ratelimit_policies": "select policy, capacity, refill, (extract(epoch from every) * 1000000)::bigint, stepped, durable, " +
		"(extract(epoch from remember) * 1000000)::bigint, shadow from ratelimit_policies()",
	"ratelimit_override":        "select from ratelimit_override($1, $2, $3, $4, $5, $6)",
	"ratelimit_remove_override": "select ratelimit_remove_override($1, $2)",
	"ratelimit_overrides": "select policy, key, capacity, refill, (extract(epoch from every) * 1000000)::bigint, " +
		"(extract(epoch from nullif(expires_at, 'infinity')) * 1000000)::bigint from ratelimit_overrides($1, $2, $3)",
	"ratelimit_acquire": fuzzDecision + "ratelimit_acquire($1, $2, $3, $4)",
	"ratelimit_enforce": fuzzDecision + "ratelimit_enforce($1, $2, $3, $4)",
	"ratelimit_status": "select policy, key, remaining, (extract(epoch from retry_after) * 1000000)::bigint, (extract(epoch from reset_after) * 1000000)::bigint, " +
		"capacity, overridden from ratelimit_status($1, $2, $3)",
	"ratelimit_doctor": "select count(*) >= 0 from ratelimit_doctor()",
	"ratelimit_acquire_many": strings.Replace(fuzzDecision, "allowed", "request, error_code, error_message, allowed", 1) +
		"ratelimit_acquire_many($1, $2, $3, $4)",
	"ratelimit_acquire_all": strings.Replace(fuzzDecision, "shadowed", "shadowed, "+fuzzDecisions, 1) +
		"ratelimit_acquire_all($1, $2, $3, $4)",
	"ratelimit_acquire_all_many": strings.NewReplacer(
		"allowed", "request, error_code, case when error_code <> '22023' then error_message end, allowed",
		"shadowed", "shadowed, "+fuzzDecisions).Replace(fuzzDecision) +
		"ratelimit_acquire_all_many($1, $2, $3, $4, $5)",
	"ratelimit_acquire_packed": fuzzPacked,
	"ratelimit_peek":           fuzzDecision + "ratelimit_peek($1, $2, $3)",
	"ratelimit_peek_many": strings.Replace(fuzzDecision, "allowed", "request, error_code, error_message, allowed", 1) +
		"ratelimit_peek_many($1, $2, $3)",
	"ratelimit_acquire_up_to_many": "select request, error_code, error_message, " + strings.TrimPrefix(strings.Replace(fuzzDecision, "shadowed", "shadowed, taken", 1), "select ") +
		"ratelimit_acquire_up_to_many($1, $2, $3)",
	"ratelimit_refund":        fuzzDecision + "ratelimit_refund($1, $2, $3)",
	"ratelimit_pause":         fuzzDecision + "ratelimit_pause($1, $2, $3)",
	"ratelimit_charge":        fuzzDecision + "ratelimit_charge($1, $2, $3, $4)",
	"ratelimit_settle":        fuzzDecision + "ratelimit_settle($1, $2, $3, $4)",
	"ratelimit_reserve":       strings.Replace(fuzzDecision, "retry_after", "wait", 1) + "ratelimit_reserve($1, $2, $3, $4, $5)",
	"ratelimit_acquire_up_to": strings.Replace(fuzzDecision, "shadowed", "shadowed, taken", 1) + "ratelimit_acquire_up_to($1, $2, $3, $4, $5)",
	"ratelimit_hold": "select allowed, remaining, (extract(epoch from retry_after) * 1000000)::bigint, (extract(epoch from held_for) * 1000000)::bigint, " +
		"capacity, renewed, shadowed from ratelimit_hold($1, $2, $3, $4)",
	"ratelimit_renew":       "select (extract(epoch from ratelimit_renew($1, $2, $3)) * 1000000)::bigint",
	"ratelimit_release":     "select ratelimit_release($1, $2, $3)",
	"ratelimit_holders":     "select policy, key, holder, cost, (extract(epoch from held_for) * 1000000)::bigint from ratelimit_holders($1, $2, $3)",
	"ratelimit_reset":       "select from ratelimit_reset($1, $2)",
	"ratelimit_reset_all":   "call ratelimit_reset_all($1)",
	"ratelimit_cleanup":     "select buckets_deleted >= 0, idempotency_keys_deleted >= 0 from ratelimit_cleanup($1)",
	"ratelimit_cleanup_all": "call ratelimit_cleanup_all($1)",
	"ratelimit_version":     "select ratelimit_version()",
	"ratelimit_shard":       "select shard, of from ratelimit_shard()",
}

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
		function := oneOf(random, fuzzFunctions)
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

	if !r.binary {
		var sql strings.Builder
		rest := fuzzStatements[function]
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
		m = append(kit.Message{&pgproto3.Parse{Query: fuzzStatements[function]}}, extended("", formats, parameters)...)
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

// Each function stands here in proportion to how often it is called.
var (
	refusing = []string{
		"ratelimit_acquire", "ratelimit_acquire", "ratelimit_acquire", "ratelimit_enforce", "ratelimit_status", "ratelimit_acquire_many", "ratelimit_acquire_many",
		"ratelimit_peek", "ratelimit_peek", "ratelimit_peek_many", "ratelimit_peek_many", "ratelimit_refund", "ratelimit_refund", "ratelimit_pause", "ratelimit_reset", "ratelimit_reset_all",
		"ratelimit_acquire_all", "ratelimit_acquire_all", "ratelimit_acquire_all_many", "ratelimit_acquire_packed", "ratelimit_acquire_packed",
		"ratelimit_override", "ratelimit_override", "ratelimit_remove_override", "ratelimit_overrides",
		"ratelimit_charge", "ratelimit_charge", "ratelimit_settle", "ratelimit_settle", "ratelimit_reserve", "ratelimit_reserve",
		"ratelimit_acquire_up_to", "ratelimit_acquire_up_to", "ratelimit_acquire_up_to_many", "ratelimit_acquire_up_to_many",
		"ratelimit_hold", "ratelimit_hold", "ratelimit_hold", "ratelimit_renew", "ratelimit_release", "ratelimit_holders",
		"ratelimit_define_policy", "ratelimit_define_policy", "ratelimit_drop_policy", "ratelimit_cleanup", "ratelimit_cleanup_all",
	}
	fuzzFunctions = append([]string{"ratelimit_policies", "ratelimit_version", "ratelimit_doctor", "ratelimit_shard"}, refusing...)
)

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
	choose := func(ok func() argument, other func() argument) argument {
		if good() {
			return ok()
		}
		return other()
	}
	anyOf := func(texts []string) argument {
		return choose(func() argument { return textArgument(oneOf(r.fuzzed, texts)) }, r.anyText)
	}
	policy := func() argument { return anyOf(r.names) }
	lends := func() argument { return anyOf([]string{r.lends, r.lends, r.lends, r.lends, r.lends, r.names[0]}) }
	keys := r.keys
	if r.fuzzer.citus && r.oneIn(2) { // so that a request has one key more often than not
		keys = []string{oneOf(r.fuzzed, keys)}
	}
	key := func() argument { return anyOf(keys) }
	cost := func() argument { return choose(func() argument { return bigintArgument(r.Int64N(4)) }, r.anyBigint) }
	rows := func() argument {
		return choose(func() argument { return integerArgument(1 + int32(r.IntN(20))) }, r.anyInteger)
	}
	idempotencyKey := func() argument {
		if r.oneIn(2) {
			return null
		}
		return key()
	}
	wait := func() argument {
		return spanArgument(span{days: int32(r.IntN(2)), micros: r.Int64N(min(364*kit.Day, int64(1)<<r.IntN(45)))})
	}
	capacity := func() argument { return bigintArgument(r.Int64N(1 << r.IntN(44))) }
	every := func() argument { return spanArgument(span{micros: 1 + r.Int64N(1<<r.IntN(55))}) }
	refill := func() argument {
		if r.oneIn(8) {
			return bigintArgument(0)
		}
		return bigintArgument(1 + r.Int64N(1<<r.IntN(44)))
	}
	orNull := func(ok func() argument) func() argument {
		return func() argument {
			if r.oneIn(3) {
				return null
			}
			return ok()
		}
	}
	switch function {
	case "ratelimit_define_policy":
		for {
			args := []argument{
				policy(), choose(capacity, r.anyBigint), choose(refill, r.anyBigint), choose(every, r.anySpan),
				choose(func() argument { return booleanArgument(r.oneIn(2)) }, r.anyBoolean),
				choose(func() argument { return null }, r.anyBoolean), choose(every, r.anySpan),
				choose(func() argument { return booleanArgument(r.oneIn(4)) }, r.anyBoolean),
			}
			if !good() || r.check(function, args) == nil { // a good one also fills in time
				return args
			}
		}
	case "ratelimit_drop_policy", "ratelimit_reset_all":
		return []argument{policy()}
	case "ratelimit_acquire", "ratelimit_charge":
		return []argument{policy(), key(), cost(), idempotencyKey()}
	case "ratelimit_enforce": // mostly of a cost that is denied now and then
		return []argument{policy(), key(), choose(capacity, r.anyBigint), idempotencyKey()}
	case "ratelimit_status":
		return []argument{orNull(policy)(), rows(), orNull(key)()}
	case "ratelimit_peek_many", "ratelimit_acquire_up_to_many":
		n := r.IntN(1 << r.IntN(8))
		return []argument{
			r.array(good, false, n, pgtype.TextOID, policy), r.array(good, false, n, pgtype.TextOID, key),
			r.array(good, function == "ratelimit_peek_many", n, pgtype.Int8OID, cost),
		}
	case "ratelimit_acquire_many":
		n := r.IntN(1 << r.IntN(10))
		return []argument{
			r.array(good, false, n, pgtype.TextOID, policy), r.array(good, false, n, pgtype.TextOID, key),
			r.array(good, true, n, pgtype.Int8OID, cost), r.array(good, true, n, pgtype.TextOID, idempotencyKey),
		}
	case "ratelimit_acquire_all":
		n := 1 + r.IntN(6)
		if !good() {
			n = oneOf(r.fuzzed, []int{0, 1, 7, 30, 1000, 1001})
		}
		return []argument{
			r.array(good, false, n, pgtype.TextOID, policy), r.array(good, false, n, pgtype.TextOID, key),
			r.array(good, true, n, pgtype.Int8OID, cost), idempotencyKey(),
		}
	case "ratelimit_acquire_all_many", "ratelimit_acquire_packed":
		sizes, n := r.sizes(good)
		args := []argument{
			r.array(good, false, n, pgtype.TextOID, policy), r.array(good, false, n, pgtype.TextOID, key),
			r.array(good, true, n, pgtype.Int8OID, cost), arrayArgument(pointers[int64](sizes), pgtype.Int4OID, sizes, r.shapeFor(len(sizes))),
			r.array(good, true, len(sizes), pgtype.TextOID, idempotencyKey),
		}
		switch {
		case function == "ratelimit_acquire_packed" && r.oneIn(2):
			args[3], args[4] = null, r.array(good, true, n, pgtype.TextOID, idempotencyKey)
		case !good():
			args[3] = oneOf(r.fuzzed, []argument{null, r.noArray()})
		}
		return args
	case "ratelimit_override":
		expires := func() argument {
			return instantArgument((1 + model.Micros(r.Int64N(1<<r.IntN(55)))).After(r.now).UnixMicro())
		}
		return []argument{
			policy(), key(), choose(orNull(capacity), r.anyBigint), choose(orNull(refill), r.anyBigint),
			choose(orNull(every), r.anySpan), choose(orNull(expires), func() argument { return r.anyInstant(r.now) }),
		}
	case "ratelimit_remove_override", "ratelimit_reset":
		return []argument{policy(), key()}
	case "ratelimit_overrides":
		return []argument{orNull(policy)(), orNull(key)(), rows()}
	case "ratelimit_peek", "ratelimit_refund":
		return []argument{policy(), key(), cost()}
	case "ratelimit_settle":
		return []argument{policy(), key(), key(), cost()}
	case "ratelimit_pause":
		return []argument{policy(), key(), choose(wait, r.anySpan)}
	case "ratelimit_reserve":
		return []argument{policy(), key(), choose(wait, r.anySpan), cost(), idempotencyKey()}
	case "ratelimit_acquire_up_to":
		least := 1 + r.Int64N(3)
		return []argument{
			policy(), key(), choose(func() argument { return bigintArgument(least + r.Int64N(1<<r.IntN(44))) }, r.anyBigint),
			choose(func() argument { return bigintArgument(least) }, r.anyBigint), idempotencyKey(),
		}
	case "ratelimit_hold":
		return []argument{lends(), anyOf(keys[:1]), key(), choose(func() argument { return bigintArgument(1 + r.Int64N(3)) }, r.anyBigint)}
	case "ratelimit_renew", "ratelimit_release":
		return []argument{lends(), anyOf(keys[:1]), key()}
	case "ratelimit_holders":
		return []argument{orNull(lends)(), orNull(key)(), rows()}
	case "ratelimit_cleanup":
		return []argument{r.anyInteger()}
	case "ratelimit_cleanup_all":
		return []argument{r.anySpan()}
	}
	return nil
}

// array makes one array of a batch: of this length, or perhaps null if it may be, when it is good.
func (r *round) array(good func() bool, nullable bool, length int, of uint32, element func() argument) argument {
	if !good() {
		switch r.IntN(12) {
		case 0:
			return null
		case 1:
			return r.noArray()
		case 2:
			length = r.IntN(1 << r.IntN(10))
		}
	}
	if nullable && r.oneIn(3) {
		return null
	}
	values := make([]argument, length)
	for i := range values {
		values[i] = element()
		for len(values[i].unreadable) > 0 || len(values[i].text) > 2000 {
			values[i] = element()
		}
	}
	var elements any = pointers[string](values)
	if of == pgtype.Int8OID {
		elements = pointers[int64](values)
	}
	return arrayArgument(elements, of, values, r.shapeFor(length))
}

// sizes are those of a batch of requests, and their sum.
func (r *round) sizes(good func() bool) (sizes []argument, sum int) {
	for range r.IntN(1 << r.IntN(7)) {
		size := 1 + r.IntN(6)
		if !good() && r.oneIn(4) {
			size = oneOf(r.fuzzed, []int{0, 0, 30, 1001})
		}
		sizes = append(sizes, integerArgument(int32(size)))
		sum += size
	}
	if len(sizes) > 0 && !good() && r.oneIn(8) {
		sizes[r.IntN(len(sizes))] = oneOf(r.fuzzed, []argument{null, integerArgument(-1), integerArgument(math.MaxInt32)})
	}
	return sizes, sum
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
	for function := range fuzzStatements {
		missing = append(missing, "to "+function)
	}
	for _, code := range []string{"rows", "22023", "RL001", "RL002", "RL003", "RL004", "RL429", "22021", "22P02", "22P03", "08P01"} {
		missing = append(missing, "answered with "+code)
	}
	return slices.DeleteFunc(missing, func(what string) bool { return n.counts[what] > 0 })
}

func (n *tally) report(run *kit.TortureRun) {
	for _, what := range slices.Sorted(maps.Keys(n.counts)) {
		run.Figure(what, n.counts[what], "")
	}
}
