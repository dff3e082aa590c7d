// Package torture tests long runs that try to break the package, and the oracles that judge them.
package torture

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/pgratelimit/pgratelimit/tests/pgtest"
	"github.com/pgratelimit/pgratelimit/tests/vectors"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { pgtest.Main(kit.MWithFigures{M: m}) }

// Random calls of all public functions, one after the other, with good arguments and with whatever the protocol can carry, get what the
// model answers: a refusal, to the SQLSTATE and the message, or the rows, in every column. Refused calls change nothing, and what
// clean-up leaves is what it must.
//
// A round depends on its seed alone.
func TestTorture_CallsAgreeWithTheModel(t *testing.T) {
	run := kit.Torture(t, 36)
	inputs := newTally()
	callers := []*caller{newCaller(t, inputs)}
	for name, script := range scripts {
		require.NoError(t, callers[0].play(script), name)
	}
	require.Empty(t, inputs.lacks(toMeet))
	var next atomic.Uint64
	next.Store(kit.FirstSeed(t))
	for range 3 {
		callers = append(callers, newCaller(t, inputs))
	}
	var failed atomic.Bool
	kit.Crowd(t, len(callers), func(n int) error {
		for run.GoesOn() && !failed.Load() {
			seed := next.Add(1) - 1
			if err := callers[n].round(seed, manners[seed%uint64(len(manners))]); err != nil {
				failed.Store(true)
				return fmt.Errorf("%w\n%s", err, kit.Repeats(t, seed))
			}
			run.Progress("%d inputs", inputs.of("inputs"))
		}
		return nil
	})
	require.Empty(t, inputs.lacks(inputs.always()))
	run.Counts(inputs.counts)
}

// A manner is how the calls of a round are drawn.
type manner struct {
	kinds []string // of policies
	bad   bool     // arguments and names, some of them
	saves bool     // transactions and savepoints
	calls int
}

var (
	badInput = manner{allKinds, true, false, 400}
	tokens   = manner{tokensOnly, false, true, 300}
	slots    = manner{slotsOnly, false, true, 300}
	manners  = []manner{badInput, tokens, badInput, slots, {allKinds, true, true, 300}, {allKinds, false, false, 300}}
)

// A caller has a database of its own.
type caller struct {
	db       *kit.TestDB
	wire     *kit.Wire
	inputs   *tally
	setClock string // a statement, with the instant for %s
	pathless bool   // statements name the schema of functions, and go by the simple protocol
	citus    bool   // a request of several keys is refused, and the rows of a dropped policy are left to clean-up
}

func newCaller(t *testing.T, inputs *tally) *caller {
	db := kit.NewDB(t)
	db.SetTimeZone("Europe/Berlin") // on which nothing depends
	db.ClockPerSession()
	c := &caller{db: db, inputs: inputs, setClock: "set test.now = '%s'"}
	c.begin(t)
	return c
}

// begin connects, and prepares the statements.
func (c *caller) begin(t *testing.T) {
	c.wire = c.db.Wire(t)
	setup := []kit.Message{simple("set synchronous_commit = off")}
	for _, name := range functions {
		setup = append(setup, prepare(name, kit.Functions[name].Statement(name)))
	}
	for _, r := range kit.NoError(c.wire.Ask(setup))(t) {
		require.Empty(t, r.Code, r)
	}
}

// functions are those that are called, and often has each of them as often as it is.
var functions, often = func() (all, often []string) {
	for _, name := range slices.Sorted(maps.Keys(kit.Functions)) {
		if n := kit.Functions[name].Often; n > 0 {
			all, often = append(all, name), append(often, slices.Repeat([]string{name}, n)...)
		}
	}
	return all, often
}()

// A sentCall is a call, or a query of the test's own, and the response that it must get.
type sentCall struct {
	function string // empty: a query
	query    string
	args     []argument
	outcomes []string // what it met, for the figures
	batch    []string // the SQLSTATEs of its requests, if it gets as far as them

	codes   []string // one of these; none: the rows
	message string   // of the refusal, when it is the package's
	rows    []string
	any     bool // the rows are not foretold
	inside  bool // a transaction is open after it
}

func (c *sentCall) String() string {
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
func (c *sentCall) verify(r kit.Response) error {
	switch {
	case r.Inside != c.inside:
		return fmt.Errorf("%v: %.300v, in a transaction: %v", c, r, r.Inside)
	case len(c.codes) > 0 && (!slices.Contains(c.codes, r.Code) || c.message != "" && c.message != r.Message):
		return fmt.Errorf("%v: %.300v instead of %s %s", c, r, strings.Join(c.codes, " or "), c.message)
	case len(c.codes) == 0 && (r.Code != "" || !c.any && len(r.Rows) != len(c.rows)):
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
	*drawn
	*caller
	manner
	binary bool // the extended protocol
	saved  []*model.Model
	late   model.Micros // a promise is tried so much later, to see that it is not kept then

	calls    []sentCall
	messages []kit.Message
}

func (c *caller) newRound(seed uint64, m manner) *round {
	r := &round{drawn: newDrawn(rand.New(rand.NewPCG(seed, 0))), caller: c, manner: m, binary: seed%2 == 0 && !c.pathless}
	r.drawn.kinds = m.kinds
	r.setTime(kit.T0)
	return r
}

func (c *caller) round(seed uint64, m manner) error { return c.newRound(seed, m).run() }

func (r *round) run() error {
	if r.bad {
		for i := range r.policies {
			r.policies[i] = r.name()
		}
		r.keys, r.ids[0], r.holders[0] = []string{r.name(), r.name()}, r.name(), r.name()
		r.policies = append(r.policies, r.name()) // an unknown one
	}
	for _, name := range r.policies[:3] {
		for range 100 {
			if _, known := r.Policy(name); known { // not every definition can be
				break
			}
			r.send("define_policy", r.encodedArgs("define_policy", r.definition(name)))
		}
	}
	for range r.manner.calls {
		if err := r.step(); err != nil {
			return err
		}
	}
	return r.finish()
}

// step makes a random call, or has time pass.
func (r *round) step() error {
	switch {
	case r.oneIn(6):
		r.passTime()
	case r.oneIn(20) && r.meetTheEnd():
	case r.oneIn(40) && !r.citus:
		return r.cleanUp()
	case r.saves && r.oneIn(16):
		r.save()
	case len(r.saved) > 0 && r.oneIn(8):
		r.rollBackOrNot(r.IntN(len(r.saved)), r.oneIn(2))
	default:
		function := oneOf(r.fuzzed, often)
		if f := kit.Functions[function]; f.Writes == "anything" && f.Arguments == "policy" && !r.oneIn(4) { // drop_policy and reset_all would leave little
			return nil
		}
		if strings.HasPrefix(kit.Functions[function].Reads, "call") && len(r.saved) > 0 { // which commits
			return nil
		}
		args, refused := r.draw(function)
		if !refused && strings.HasPrefix(function, "cleanup") { // see cleanUp
			return nil
		}
		if c := r.send(function, args); c != nil && isPromise(c) && r.oneIn(2) && !r.citus {
			if err := r.keepsPromise(c, args); err != nil {
				return err
			}
		}
		if function == "drop_policy" && !r.oneIn(3) {
			if name, ok := args[0].value.(string); ok && slices.Contains(r.policies, name) && len(args[0].unreadable) == 0 {
				r.send("define_policy", r.encodedArgs("define_policy", r.definition(name)))
			}
		}
	}
	return nil
}

// draw draws arguments, and tells whether they alone have the call refused.
func (r *round) draw(function string) (args []argument, refused bool) {
	n := 0
	if r.bad && !r.oneIn(3) {
		n = 4
	}
	args = r.drawn.spoilt(function, n)
	if r.citus && r.oneIn(2) { // so that a request has one key more often than not
		keys := r.keys
		r.keys = keys[:1]
		args = r.drawn.spoilt(function, n)
		r.keys = keys
	}
	return args, r.refuses(function, args)
}

func (r *round) refuses(function string, args []argument) bool {
	return slices.ContainsFunc(args, func(a argument) bool { return len(a.unreadable) > 0 }) || r.call(function, args).Refused()
}

func (r *round) call(function string, args []argument) *kit.Call {
	c := &kit.Call{Function: function, Model: r.Model, Now: r.now, OneKey: r.citus}
	for _, a := range args {
		c.Args = append(c.Args, a.value)
	}
	return c
}

// finish looks at all that there is, makes calls that are refused, and drops the policies.
func (r *round) finish() error {
	if len(r.saved) > 0 {
		r.rollBackOrNot(0, true)
	}
	for _, id := range kit.BucketsInOrder(r.Buckets()) {
		r.send("peek", r.encodedArgs("peek", []any{id.Policy, id.Key, int64(1)}))
	}
	count := countQuery
	if r.citus {
		count = strings.NewReplacer("buckets)", "buckets where policy_id in (select id from ratelimit.policies))",
			"_keys)", "_keys where policy_id in (select id from ratelimit.policies))",
			"usage)", "usage where policy_id in (select id from ratelimit.policies))").Replace(count)
	}
	r.look(count, fmt.Sprintf("%d|%d|%d|%d|%d|%d", len(r.Policies()), len(r.Buckets()), r.Grants(), len(r.Overrides()), len(r.Holders(r.now, nil, nil)), r.Kept()))
	before := r.read(stateQuery)
	for range r.manner.calls / 4 {
		function := oneOf(r.fuzzed, often)
		for range 10 {
			if args := r.drawn.spoilt(function, 2); r.refuses(function, args) {
				r.send(function, args)
				break
			}
		}
	}
	after := r.read(stateQuery)
	responses, err := r.flush()
	if err != nil {
		return err
	}
	if b, a := responses[before], responses[after]; !slices.Equal(b.Rows, a.Rows) {
		return fmt.Errorf("refused calls changed the state from %v to %v", b, a)
	}
	if !r.citus {
		if err := r.cleanUp(); err != nil {
			return err
		}
	}

	// Clean-up may take any bucket that is full, so nothing is asked of buckets afterwards.
	for range 2 {
		r.send("cleanup", r.encodedArgs("cleanup", []any{max(1, int64(int32(r.integer())))}))
		r.send("cleanup_all", r.encodedArgs("cleanup_all", []any{r.value("budget", "", "", nil)}))
	}
	return r.dropAll()
}

// dropAll drops the policies, and looks that nothing is left.
func (r *round) dropAll() error {
	for _, name := range slices.Sorted(maps.Keys(r.Policies())) {
		r.send("drop_policy", r.encodedArgs("drop_policy", []any{name}))
	}
	r.look("call ratelimit_cleanup_all()")
	r.look(countQuery, "0|0|0|0|0|0")
	_, err := r.flush()
	return err
}

func (d *drawn) encodedArgs(function string, values []any) (args []argument) {
	for i, a := range kit.Functions[function].List() {
		if a.Array {
			args = append(args, d.array(a, values[i], func() bool { return false }))
			continue
		}
		args = append(args, encode(kit.Kinds[a.Kind].Type, values[i]))
	}
	return args
}

const (
	stateQuery = `
		select coalesce(sum(hashtextextended(t, 0)::numeric), 0)
		  from (select p::text from ratelimit.policies as p
		        union all select 'o' || o::text from ratelimit.overrides as o
		        union all select 'u' || u::text from ratelimit.usage as u
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
		       (select count(*) from ratelimit_holders(null, null, 1000000)),
		       (select count(*) from ratelimit.usage)`

	leftQuery = `
		select coalesce(p.name, 'gone'), b.key
		  from (table ratelimit.buckets union all table ratelimit.ephemeral_buckets) as b left join ratelimit.policies as p on p.id = b.policy_id`

	keptQuery = `
		select (select count(*) from ratelimit.idempotency_keys) + (select count(*) from ratelimit.ephemeral_idempotency_keys),
		       (select count(*) from ratelimit.overrides)`

	// Leases, also those that have ended; then leases without their lock, and sums in the rows of keys that are not those of their leases.
	leasesQuery = `
		with l as (select l.*, p.name
		             from (table ratelimit.leases union all table ratelimit.ephemeral_leases) as l left join ratelimit.policies as p on p.id = l.policy_id),
		     s as (table ratelimit.slots union all table ratelimit.ephemeral_slots)
		select concat_ws(' ', coalesce(l.name, 'gone'), l.key, l.holder, l.cost, (extract(epoch from l.ends_at) * 1000000)::bigint) collate "C" from l
		 union all
		select 'without its lock ' || l.key from l where (l.policy_id, l.key) not in (select s.policy_id, s.key from s)
		 union all
		select 'another sum ' || s.key
		  from s left join l using (policy_id, key)
		 group by s.policy_id, s.key, s.held, s.counted_until
		having s.counted_until > '-infinity' and (s.held <> coalesce(sum(l.cost), 0) or s.counted_until > min(l.ends_at))
		 order by 1`
)

// cleanUp compares which buckets, leases, overrides and idempotency keys are left.
func (r *round) cleanUp() error {
	r.send("cleanup", r.encodedArgs("cleanup", []any{int64(10_000)}))
	r.CleanUp(r.now)
	left := r.read(leftQuery)
	var leases []string
	for _, id := range r.Held() {
		for holder, l := range r.Leases(id) {
			leases = append(leases, fmt.Sprint(id.Policy, " ", id.Key, " ", holder, " ", l.Cost, " ", l.Ends.UnixMicro()))
		}
	}
	slices.Sort(leases)
	r.look(leasesQuery, leases...)
	r.look(keptQuery, fmt.Sprintf("%d|%d", r.Grants(), len(r.Overrides())))
	responses, err := r.flush()
	if err != nil {
		return err
	}
	rows := map[model.BucketID]bool{}
	for _, row := range responses[left].Values {
		rows[model.BucketID{Policy: row[0], Key: row[1]}] = true
	}
	for _, id := range r.Buckets() {
		if !rows[id] && !r.Remove(r.now, id) {
			return fmt.Errorf("clean-up removed %v, which was not full", id)
		}
		delete(rows, id)
	}
	r.ForgetUsage(r.now)
	if len(rows) > 0 {
		return fmt.Errorf("buckets that should have no row: %v", rows)
	}
	return nil
}

// flush sends all calls, and verifies the responses.
func (r *round) flush() ([]kit.Response, error) {
	defer func() { r.calls, r.messages = nil, nil }()
	responses, err := r.ask()
	if err != nil {
		return nil, err
	}
	for i, c := range r.calls {
		if err := c.verify(responses[i]); err != nil {
			return nil, fmt.Errorf("%w\nafter\n%s", err, r.before(i, c))
		}
	}
	r.inputs.add(r, responses)
	return responses, nil
}

// ask sends all calls. On Citus it sends one by one, and again what a move of a shard had fail. What reads all shards may come when the table
// of one is dropped.
func (r *round) ask() (all []kit.Response, err error) {
	if !r.citus {
		return r.wire.Ask(r.messages)
	}
	for i := 0; i < len(r.messages); {
		responses, err := r.wire.Ask(r.messages[i : i+1])
		if err != nil {
			return nil, err
		}
		function := r.calls[i].function
		readsAll := kit.Functions[function].Writes == "" || function == "reset_all"
		if a := responses[0]; a.Message == "the shard has moved" || a.Warning == "a node was not cleaned up" && function == "" || a.Code == "42P01" && readsAll {
			r.inputs.count("failed as a shard moved")
			continue
		}
		all = append(all, responses...)
		i++
	}
	return all, nil
}

// before lists the last calls about the policies of one, and what moved the clock or a transaction.
func (r *round) before(i int, c sentCall) string {
	var lines []string
	for _, of := range r.calls[:i] {
		if of.function == "" {
			lines = append(lines, of.query)
		} else if len(of.args) > 0 && len(c.args) > 0 && strings.Contains(c.String(), string(of.args[0].text)) {
			lines = append(lines, fmt.Sprintf("%v: %s%q", &of, strings.Join(of.codes, " "), of.rows))
		}
	}
	return strings.Join(lines[max(0, len(lines)-40):], "\n")
}

// add adds a message and the response that it must get.
func (r *round) add(m kit.Message, c sentCall) int {
	c.inside = len(r.saved) > 0
	r.messages, r.calls = append(r.messages, m), append(r.calls, c)
	return len(r.calls) - 1
}

// look adds a query of the test's own, and the rows that it must find.
func (r *round) look(sql string, rows ...string) {
	r.add(r.simple(sql), sentCall{query: sql, rows: rows})
}

func (r *round) read(sql string) int { return r.add(r.simple(sql), sentCall{query: sql, any: true}) }

func (c *caller) simple(sql string) kit.Message {
	if c.pathless {
		sql = callOf.ReplaceAllString(sql, "public.$0")
	}
	return simple(sql)
}

// save begins a transaction, or sets a savepoint in it.
func (r *round) save() {
	begin := "begin"
	if n := len(r.saved); n > 0 {
		begin = fmt.Sprint("savepoint s", n)
	}
	r.saved = append(r.saved, r.Clone())
	r.look(begin)
}

// rollBackOrNot ends what one save began, and all that was saved since.
func (r *round) rollBackOrNot(to int, keep bool) {
	before := r.saved[to]
	r.saved = r.saved[:to]
	switch {
	case to == 0:
		r.look(map[bool]string{true: "commit", false: "rollback"}[keep])
	case keep:
		r.look(fmt.Sprint("release s", to))
	default:
		r.look(fmt.Sprintf("rollback to s%[1]d; release s%[1]d", to))
	}
	if !keep {
		r.Model = before
		r.setTime(r.now) // which was set in the transaction
	}
}

// passTime moves the clock to when something happens, or to a microsecond beside it, or otherwise: forwards more often than not.
func (r *round) passTime() {
	if len(r.instants) > 0 && r.oneIn(2) {
		r.setTime(model.Micros(r.IntN(3) - 1).After(oneOf(r.fuzzed, r.instants)))
		return
	}
	step := r.span()
	if r.oneIn(4) {
		step = -step
	}
	r.setTime(step.After(r.now))
}

func (r *round) setTime(now time.Time) {
	if now.Year() < 1 || now.Year() > 200_000 { // PostgreSQL's calendar would soon end
		now = kit.T0
	}
	r.now = now
	r.look(fmt.Sprintf(r.setClock, encode("timestamptz", kit.Instant(now.UnixMicro())).text))
}

// meetTheEnd has a holder come at the end of its lease, or a microsecond beside it. Among several keys and holders calls seldom do.
func (r *round) meetTheEnd() bool {
	held := kit.BucketsInOrder(r.Held())
	if len(held) == 0 {
		return false
	}
	id := oneOf(r.fuzzed, held)
	leases := r.Leases(id)
	holder := oneOf(r.fuzzed, slices.Sorted(maps.Keys(leases)))
	r.setTime(model.Micros(r.IntN(3) - 1).After(leases[holder].Ends))
	function := oneOf(r.fuzzed, []string{"hold", "renew", "release"})
	args := []any{id.Policy, id.Key, holder, leases[holder].Cost}
	r.send(function, r.encodedArgs(function, args[:len(kit.Functions[function].List())]))
	return true
}

// keepsPromise has the same call made when it was told to come again, and a microsecond before, or after ages if it was told never.
func (r *round) keepsPromise(c *kit.Call, args []argument) error {
	now, wait := r.now, c.Told[0].RetryAfter
	r.save()
	defer func() {
		r.rollBackOrNot(len(r.saved)-1, false)
		r.setTime(now)
	}()
	for _, at := range map[bool][]model.Micros{false: {wait + r.late - 1, wait + r.late}, true: {4000 * 365 * kit.Day}}[wait == model.Never] {
		then := at.After(now)
		if wait == model.Longest || then.Year() > 200_000 { // where times saturate
			return nil
		}
		r.setTime(then)
		if again := r.send(c.Function, args); again.Told[0].Allowed != (wait != model.Never && at == wait+r.late) {
			return fmt.Errorf("%w: %s, at %v: %+v, at %v: %+v", errPromise, &sentCall{function: c.Function, args: args}, now, c.Told[0], then, again.Told[0])
		}
		r.inputs.count("promises of " + c.Function)
	}
	return nil
}

var errPromise = errors.New("a promise is broken")

// isPromise reports whether a call was denied that can be made again: a grant that is remembered ends by itself.
func isPromise(c *kit.Call) bool {
	return slices.Contains([]string{"acquire", "acquire_all", "peek", "hold"}, c.Function) && len(c.Told) > 0 && !c.Told[0].Allowed &&
		(c.Function == "hold" || c.Args[len(c.Args)-1] == nil || c.Function == "peek")
}

// send foretells the answer to a call, and adds it. The call is one that arrives.
func (r *round) send(function string, args []argument) (arrived *kit.Call) {
	s := sentCall{function: function, args: args}
	for _, a := range args {
		s.codes = append(s.codes, a.unreadable...)
	}
	if len(s.codes) == 0 {
		c := r.call(function, args)
		arrived = c
		p, _ := r.Policy(fmt.Sprint(append(c.Args, nil)[0]))
		rows, err := c.Answer()
		s.rows, s.batch = rows, c.Codes
		if err != nil {
			code, message := kit.Refusal(err)
			s.codes, s.message = []string{code}, message
		}
		if err == nil || len(c.Told) > 0 {
			r.saw(function, c.Told)
			r.again[function] = lastFew(append(r.again[function], c.Args))
			for _, d := range c.Told[:min(1, len(c.Told))] {
				s.outcomes = []string{function + ": " + outcome(d), kindOf(p) + ", " + function + ": " + outcome(d)}
			}
		}
	}
	r.add(r.message(function, args), s)
	if len(s.codes) > 0 && len(r.saved) > 0 { // there is no other way on
		r.calls[len(r.calls)-1].inside = true
		r.rollBackOrNot(len(r.saved)-1, false)
	}
	return arrived
}

// outcome is what a decision shows.
func outcome(d kit.Decision) string {
	switch {
	case d.Replayed:
		return "replayed"
	case d.Shadowed:
		return "shadowed"
	case !d.Allowed && d.RetryAfter == model.Never:
		return "denied for ever"
	case !d.Allowed:
		return "denied"
	case d.RetryAfter > 0:
		return "waits"
	case d.Remaining < 0:
		return "debt"
	}
	return "granted"
}

func (r *round) message(function string, args []argument) kit.Message {
	if !r.binary {
		return r.simple(r.sql(function, args))
	}
	formats, parameters := make([]int16, len(args)), make([][]byte, len(args))
	for i, a := range args {
		if parameters[i] = a.text; a.binary != nil && r.oneIn(2) {
			formats[i], parameters[i] = 1, a.binary
		}
	}
	m := extended(function, formats, parameters)
	if r.oneIn(16) {
		m = append(kit.Message{&pgproto3.Parse{Query: kit.Functions[function].Statement(function)}}, extended("", formats, parameters)...)
	}
	return m
}

// sql is a call with its arguments.
func (f fuzzed) sql(function string, args []argument) string {
	var sql strings.Builder
	rest := kit.Functions[function].Statement(function)
	for i, a := range args {
		before, after, _ := strings.Cut(rest, fmt.Sprintf("$%d", i+1))
		sql.WriteString(before)
		sql.WriteString(f.literal(a))
		rest = after
	}
	return sql.String() + rest
}

// literal writes an argument in one of the ways that SQL has.
func (f fuzzed) literal(a argument) string {
	s := string(a.text)
	switch n, isNumber := a.value.(int64); {
	case a.text == nil:
		return "null"
	case isNumber && 0 <= n && n <= math.MaxInt32 && f.oneIn(2):
		return s
	case !strings.Contains(s, "$") && f.oneIn(3):
		return "$q$" + s + "$q$"
	case f.oneIn(2):
		return "E'" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(s) + "'"
	}
	return "'" + strings.ReplaceAll(s, "'", "''") + "'"
}

// play makes the calls of a script, each on a line: see scripts.
func (c *caller) play(script string) error {
	r := c.newRound(0, tokens)
	for line := range strings.Lines(script) {
		line, _, _ = strings.Cut(strings.TrimSpace(line), " #")
		refused := strings.HasPrefix(line, "! ")
		words := strings.Fields(strings.TrimPrefix(line, "! "))
		switch {
		case len(words) == 0:
			continue
		case words[0] == "wait":
			r.setTime(parse("interval", words[1]).(kit.Span).Micros().After(r.now))
			continue
		case words[0] == "at":
			r.setTime(time.UnixMicro(int64(parse("timestamptz", words[1]).(kit.Instant))))
			continue
		case words[0] == "clean_up":
			if err := r.cleanUp(); err != nil {
				return err
			}
			if len(words) > 1 && slices.Contains(r.Buckets(), model.BucketID{Policy: words[1], Key: words[2]}) {
				return fmt.Errorf("%s: the row is left", line)
			}
			continue
		}
		arguments := kit.Functions[words[0]].List()
		values := make([]any, len(arguments))
		for place, word := range words[1:] {
			if name, value, named := strings.Cut(word, "="); named {
				place, word = slices.IndexFunc(arguments, func(a kit.Argument) bool { return a.Name == name }), value
			}
			of := kit.Kinds[arguments[place].Kind].Type
			switch {
			case word == "-":
			case strings.HasPrefix(word, "+"): // from now
				values[place] = kit.Instant(parse("interval", word[1:]).(kit.Span).Micros().After(r.now).UnixMicro())
			case arguments[place].Array && of == "text":
				values[place] = parsed[string](of, word)
			case arguments[place].Array:
				values[place] = parsed[int64](of, word)
			default:
				values[place] = parse(of, word)
			}
		}
		r.send(words[0], r.encodedArgs(words[0], values))
		if last := r.calls[len(r.calls)-1]; refused != slices.Equal(last.codes, []string{"22023"}) {
			return fmt.Errorf("%s: the model says %v", line, last.codes)
		}
	}
	return r.dropAll()
}

func parsed[T any](of, words string) (values []*T) {
	for word := range strings.SplitSeq(words, ",") {
		values = append(values, new(parse(of, word).(T)))
	}
	return values
}

// parse reads a word of a script. A word that cannot be read is a mistake in it.
func parse(of, word string) any {
	number := func(s string) int64 {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil {
			panic(fmt.Sprintf("%s %q: %v", of, word, err))
		}
		return n
	}
	switch of {
	case "text":
		return word
	case "boolean":
		return word == "true"
	case "interval":
		days, isDays := strings.CutSuffix(word, "d")
		months, isMonths := strings.CutSuffix(word, "mon")
		switch {
		case strings.HasSuffix(word, "mon1d"):
			return kit.Span{Months: int32(number(strings.TrimSuffix(word, "mon1d"))), Days: 1}
		case isMonths:
			return kit.Span{Months: int32(number(months))}
		case isDays:
			return kit.Span{Days: int32(number(days))}
		}
		length, err := time.ParseDuration(word)
		if err != nil {
			panic(err)
		}
		return kit.Span{Us: length.Microseconds()}
	case "timestamp", "timestamptz":
		at, err := time.Parse("2006-01-02T15:04:05.999999", word)
		if err != nil {
			panic(err)
		}
		return kit.Instant(at.UnixMicro())
	}
	return number(word)
}

// A tally counts inputs: a call is one, and a batch that gets as far as its requests is as many as those.
type tally struct {
	mu     sync.Mutex
	counts map[string]int // by the names of figures
}

func newTally() *tally { return &tally{counts: map[string]int{}} }

func (n *tally) add(r *round, responses []kit.Response) {
	protocol := map[bool]string{false: "simple", true: "extended"}[r.binary]
	for i, c := range r.calls {
		if c.function == "" {
			continue
		}
		codes := c.batch
		if len(codes) == 0 {
			codes = []string{responses[i].Code}
		}
		for _, code := range codes {
			n.count("inputs", "by the "+protocol+" protocol", "to "+c.function, "answered with "+cmp.Or(code, "rows"))
		}
		n.count(c.outcomes...)
	}
}

func (n *tally) count(all ...string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, what := range all {
		n.counts[what]++
	}
}

func (n *tally) of(what string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.counts[what]
}

// always is what no run must miss.
func (n *tally) always() (what []string) {
	for _, function := range functions {
		what = append(what, "to "+function)
	}
	for _, code := range []string{"rows", "22023", "RL001", "RL002", "RL003", "RL004", "RL429", "22021", "22P02", "22P03", "08P01"} {
		what = append(what, "answered with "+code)
	}
	for _, function := range []string{"acquire", "acquire_all", "peek", "hold"} {
		what = append(what, "promises of "+function)
	}
	return what
}

// lacks names what no input has met yet.
func (n *tally) lacks(what []string) []string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(what), func(what string) bool { return n.counts[what] > 0 })
}

// A microsecond too early or too late is a promise that is not kept.
func TestCalls_APromiseIsExact(t *testing.T) {
	t.Parallel()
	for _, late := range []model.Micros{-1, 1} {
		for _, m := range []manner{tokens, slots} {
			c := newCaller(t, newTally())
			err := error(nil)
			for seed := uint64(0); err == nil && seed < 20; seed++ {
				r := c.newRound(seed, m)
				r.late = late
				err = r.run()
			}
			require.ErrorIs(t, err, errPromise)
		}
	}
}

// find has a planted bug found, by its script or else in some rounds.
func (c *caller) find(t *testing.T, bug string, m manner) {
	if script, _, has := strings.Cut(bug, ": "); has {
		err := c.play(scripts[script])
		require.Error(t, err)
		t.Logf("found: %.300v", err)
		return
	}
	seed := kit.TestSeed(t)
	for n := range uint64(500) {
		if err := c.round(seed+n, m); err != nil {
			t.Logf("found in round %d: %.300v", n+1, err)
			return
		}
	}
	t.Error("it is not found in 500 rounds")
}

// Each turn is where PostgreSQL has it, to the microsecond, and is the next one until then.
func TestCalendar_TurnsAreThoseOfPostgreSQL(t *testing.T) {
	t.Parallel()
	for _, c := range vectors.Turns {
		calendar := model.Calendar{Period: model.Period(c.Period), Zone: c.Zone, Anchor: c.Anchor}
		name := fmt.Sprintf("%+v", c)
		require.Equal(t, c.At, calendar.Turn(c.N).UTC(), name)
		require.Equal(t, c.At, calendar.Next(c.At.Add(-time.Microsecond)), name)
		require.True(t, calendar.Next(c.At).After(c.At), name)
		require.Contains(t, []time.Time{calendar.Turn(c.N + 1).UTC(), calendar.Turn(c.N + 2).UTC()}, calendar.Next(c.At), name)
	}
}

// Clean-up of the database may leave a row that it could remove, so a comparison does not find a model that would remove too much.
// A bucket that is full by the policy's numbers alone, or by its override's alone, must stay, and so must one that refills nothing. An
// override counts for as long as it had not expired when clean-up judges.
func TestCleanUp_LooksAtOverrides(t *testing.T) {
	t.Parallel()
	began, expires, user := kit.T0, kit.T0.Add(time.Hour), model.BucketID{Policy: "user", Key: "k"}
	for _, c := range []struct {
		level, capacity int64
		at              time.Time
		full            bool
	}{
		{10, 10, began, true},
		{10, 20, began, false},
		{5, 5, began, false},
		{20, 20, began, true},
		{10, 20, expires.Add(model.CleanUpMargin).Add(-time.Microsecond), false},
		{10, 20, expires.Add(model.CleanUpMargin), true},
		{9, 9, began.AddDate(5000, 0, 0), false},
	} {
		m := model.New()
		require.NoError(t, m.Define("user", model.Definition{Numbers: model.Numbers{Capacity: new(int64(10)), Refill: new(int64(0)), Every: new(model.Micros(1_000_000))}}))
		_, err := m.Override(began, user, model.Numbers{Capacity: &c.capacity}, expires)
		require.NoError(t, err)
		m.Put(user, model.Bucket{Level: big.NewInt(c.level * 1_000_000), RefilledAt: began})
		m.CleanUp(c.at)
		require.Equal(t, c.full, m.Remove(c.at, user), c)
	}
}
