package kit

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

// A Function is a row of the call table of all public functions, of which random calls, scripts, plans and read-only refusals are made.
type Function struct {
	Often     int    // among random calls, in proportion to the others; 0: it is not called by itself
	Arguments string // in order: each a name, with :kind where Kinds has it by another, [] for an array, and ? where null has a meaning
	Reads     string // the columns that are compared; or the whole statement, with @ for the call
	Writes    string // "tokens" and "slots" of a key, or "anything"; empty: nothing, or it is not called by itself
	Quiet     bool   // the message of a refusal is not foretold
	Foretell  func(c *Call) ([]string, error)
}

type Argument struct {
	Name, Kind      string
	Array, Nullable bool
}

// List are the arguments, which are read once.
func (f Function) List() []Argument { return lists[f.Arguments] }

var lists = map[string][]Argument{}

func listOf(arguments string) (all []Argument) {
	for _, word := range strings.Fields(arguments) {
		var a Argument
		word, a.Nullable = strings.CutSuffix(word, "?")
		word, a.Array = strings.CutSuffix(word, "[]")
		name, kind, named := strings.Cut(word, ":")
		if a.Name, a.Kind = name, name; named {
			a.Kind = kind
		}
		all = append(all, a)
	}
	return all
}

// Statement is the SQL of a call, with as many parameters as the function has arguments.
func (f Function) Statement(name string) string {
	var parameters []string
	for i := range f.List() {
		parameters = append(parameters, fmt.Sprintf("$%d", i+1))
	}
	statement := f.Reads
	if !strings.Contains(statement, "@") {
		statement = "select " + statement + " from @"
	}
	return strings.Replace(statement, "@", "ratelimit_"+name+"("+strings.Join(parameters, ", ")+")", 1)
}

// Functions make the call table, by the name after ratelimit_.
var Functions map[string]Function

// us are the microseconds of an interval or an instant.
func us(column string) string { return "(extract(epoch from " + column + ") * 1000000)::bigint" }

func init() {
	decision := "allowed, remaining, " + us("retry_after") + ", " + us("reset_after") + ", capacity, replayed, shadowed"
	decisions := `(select string_agg(format('%s|%s|%s|%s|%s|%s|%s', d.allowed, d.remaining, ` + us("d.retry_after") + ", " + us("d.reset_after") + `,
		                          d.capacity, d.replayed, d.shadowed), '; ' order by d.n)
		   from unnest(decisions) with ordinality as d (allowed, remaining, retry_after, reset_after, capacity, replayed, shadowed, n))`
	whole := decision + ", binding, " + decisions
	wholes := "request, error_code, case when error_code <> '22023' then error_message end, " + whole
	calendar := us("lease") + ", time_zone, " + us("anchor")
	override := "policy, key, capacity, refill, " + us("every") + ", " + us("expires_at") + ", " + calendar

	// What the arrays hold, each number of an element or a request once.
	packed := `
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

	Functions = map[string]Function{
		"define_policy": {2, "policy capacity? refill? every? stepped? durable? remember? shadow? period? time_zone? anchor? lease? history?",
			"", "anything", true, func(c *Call) ([]string, error) {
				return nothing, c.Model.Define(c.text(0), model.Definition{
					Numbers: c.numbers(1, 9), Stepped: pointerTo[bool](c.Args[4]), Durable: pointerTo[bool](c.Args[5]), Remember: c.micros(6),
					Shadow: pointerTo[bool](c.Args[7]), Period: c.period(8), History: c.history(12),
				})
			}},
		"drop_policy": {1, "policy", "", "anything", false, func(c *Call) ([]string, error) { return nothing, c.Model.Drop(c.text(0)) }},
		"policies": {1, "",
			"policy, capacity, refill, " + us("every") + ", stepped, durable, " + us("remember") + ", shadow, period, " + calendar + ", history",
			"", false, func(c *Call) ([]string, error) {
				return policyRows(c.Model.Policies()), nil
			}},
		"override": {2, "policy key capacity? refill? every? expires_at? time_zone? anchor? lease?",
			override, "anything", true, func(c *Call) ([]string, error) {
				_, err := c.Model.Override(c.Now, c.bucket(), c.numbers(2, 6), c.expires(5))
				if err != nil {
					return nil, err
				}
				return partRows(c.bucket(), c.Model.Overrides()[c.bucket()].Parts(c.Now)), nil
			}},
		"remove_override": {1, "policy key", "*", "anything", false, func(c *Call) ([]string, error) {
			return c.flag(c.Model.RemoveOverride(c.Now, c.bucket()))
		}},
		"overrides": {1, "policy? key? max_rows",
			override, "", true, func(c *Call) ([]string, error) {
				return c.listed(c.overrideRows(), 2, nil)
			}},

		"acquire": {3, "policy key cost idempotency_key?", decision, "tokens", false, func(c *Call) ([]string, error) {
			return c.decided(c.Model.Acquire(c.Now, c.bucket(), c.num(2), c.text(3)))
		}},
		"enforce": {1, "policy key cost idempotency_key?", decision, "tokens", false, func(c *Call) ([]string, error) {
			d, err := c.Model.Acquire(c.Now, c.bucket(), c.num(2), c.text(3))
			if err == nil && !d.Allowed {
				err = limitExceeded
			}
			return c.decided(d, err)
		}},
		"peek": {2, "policy key cost", decision, "", false, func(c *Call) ([]string, error) {
			return c.decided(c.Model.Peek(c.Now, c.bucket(), c.num(2)))
		}},
		"refund": {2, "policy key amount:cost", decision, "tokens", false, func(c *Call) ([]string, error) {
			return c.decided(c.Model.Refund(c.Now, c.bucket(), c.num(2)))
		}},
		"http_fields": {0, "policy decision", "@", "", false, nil},
		"reset":       {1, "policy key", "", "tokens slots", false, func(c *Call) ([]string, error) { return nothing, c.Model.Reset(c.Now, c.bucket()) }},
		"pause": {1, "policy key pause_for", decision, "tokens", false, func(c *Call) ([]string, error) {
			return c.decided(c.Model.Pause(c.Now, c.bucket(), c.Args[2].(Span).Micros()))
		}},
		"charge": {2, "policy key cost:charge idempotency_key?", decision, "tokens", false, func(c *Call) ([]string, error) {
			return c.decided(c.Model.Charge(c.Now, c.bucket(), c.num(2), c.text(3)))
		}},
		"settle": {2, "policy key idempotency_key:granted cost:charge", decision, "tokens", false, func(c *Call) ([]string, error) {
			return c.decided(c.Model.Settle(c.Now, c.bucket(), c.text(2), c.num(3)))
		}},
		"settle_all": {2, "policies:policy[] keys:key[] idempotency_key:granted costs:charge[]", "replayed, " + decisions, "tokens", true, (*Call).settled},
		"grants": {1, "policy key? settled? max_rows",
			"policy, key, idempotency_key, cost, settled, " + us("granted_for") + ", " + us("expires_in"), "", true, func(c *Call) (rows []string, err error) {
				grants, err := c.Model.Granted(c.Now, c.text(0), pointerTo[string](c.Args[1]), pointerTo[bool](c.Args[2]))
				for _, g := range grants {
					rows = append(rows, fmt.Sprintf("%s|%s|%s|%d|%s|%d|%d", g.Policy, g.Key, g.IdempotencyKey, g.Cost, letter[g.Settled], g.GrantedFor, g.ExpiresIn))
				}
				return c.listed(rows, 3, err)
			}},
		"usage": {2, "policy key? since? until? max_rows", "policy, key, " + us("began") + ", " + us("ended") + ", used, closed", "", true, func(c *Call) (rows []string, err error) {
			usage, err := c.Model.Usage(c.Now, c.text(0), pointerTo[string](c.Args[1]), c.bound(2), c.bound(3))
			if err == nil && c.OneKey {
				return nil, errUsageOfNodes
			}
			for _, u := range usage {
				rows = append(rows, fmt.Sprintf("%s|%s|%d|%d|%d|%s", u.Policy, u.Key, u.Began.UnixMicro(), u.Ended.UnixMicro(), u.Used, letter[u.Closed]))
			}
			return c.listed(rows, 4, err)
		}},
		"reserve": {2, "policy key max_wait cost idempotency_key?",
			strings.Replace(decision, "retry_after", "wait", 1), "tokens", false, func(c *Call) ([]string, error) {
				return c.decided(c.Model.Reserve(c.Now, c.bucket(), c.Args[2].(Span).Micros(), c.num(3), c.text(4)))
			}},
		"acquire_up_to": {2, "policy key at_most at_least idempotency_key?", decision + ", taken", "tokens", false, func(c *Call) ([]string, error) {
			if c.num(3) > c.num(2) {
				return nil, refusal("invalid at_least")
			}
			d, taken, err := c.Model.AcquireUpTo(c.Now, c.bucket(), c.num(2), c.num(3), c.text(4))
			rows, err := c.decided(d, err)
			return []string{fmt.Sprintf("%s|%d", rows[0], taken)}, err
		}},

		"acquire_all": {2, "policies:policy[] keys:key[] costs:cost[]? idempotency_key?", whole, "tokens", true, func(c *Call) ([]string, error) {
			w, err := c.whole(request{c.charges(2), c.Args[3]})
			return []string{wholeInColumns(w)}, err
		}},
		"acquire_many": {3, "policies:policy[] keys:key[] costs:cost[]? idempotency_keys:idempotency_key[]? sizes:size[]?",
			wholes, "tokens", true, (*Call).wholes},
		"acquire_packed": {2, "policies:policy[] keys:key[] costs:cost[]? sizes:size[]? idempotency_keys:idempotency_key[]?",
			packed, "tokens", true, (*Call).packed},

		"hold": {3, "policy key holder cost:slots",
			"allowed, remaining, " + us("retry_after") + ", " + us("held_for") + ", capacity, renewed, shadowed",
			"slots", false, func(c *Call) ([]string, error) {
				d, err := c.Model.Hold(c.Now, c.bucket(), c.text(2), c.num(3))
				if errors.Is(err, model.IdempotencyMismatch) {
					err = errHeldOtherwise
				}
				return c.decided(Decision{
					Allowed: d.Allowed, Remaining: d.Remaining, RetryAfter: d.RetryAfter, ResetAfter: d.HeldFor, Capacity: d.Capacity,
					Replayed: d.Renewed, Shadowed: d.Shadowed,
				}, err)
			}},
		"renew": {2, "policy key holder", us("ratelimit_renew"), "slots", false, func(c *Call) ([]string, error) {
			heldFor, holds, err := c.Model.Renew(c.Now, c.bucket(), c.text(2))
			if !holds {
				return c.decided(Decision{RetryAfter: model.Never}, err, "")
			}
			return c.decided(Decision{Allowed: true, ResetAfter: heldFor}, err, orNothing(heldFor))
		}},
		"release": {2, "policy key holder", "*", "slots", false, func(c *Call) ([]string, error) {
			return c.flag(c.Model.Release(c.Now, c.bucket(), c.text(2)))
		}},
		"holders": {1, "policy? key? max_rows", "policy, key, holder, cost, " + us("held_for"), "", true, func(c *Call) (rows []string, err error) {
			for _, h := range c.Model.Holders(c.Now, pointerTo[string](c.Args[0]), pointerTo[string](c.Args[1])) {
				rows = append(rows, fmt.Sprintf("%s|%s|%s|%d|%d", h.Policy, h.Key, h.Holder, h.Cost, h.HeldFor))
			}
			return c.listed(rows, 2, nil)
		}},
		"status": {1, "policy? max_rows key?",
			"policy, key, remaining, " + us("retry_after") + ", " + us("reset_after") + ", capacity, overridden", "", true, func(c *Call) ([]string, error) {
				return c.listed(c.statusRows(), 1, nil)
			}},
		"reset_all":   {1, "policy", "call @", "anything", false, func(c *Call) ([]string, error) { return nil, c.Model.ResetAll(c.Now, c.text(0)) }},
		"cleanup":     {1, "max_rows", "buckets_deleted >= 0, idempotency_keys_deleted >= 0", "anything", false, says("t|t")},
		"cleanup_all": {1, "budget", "call @", "anything", false, says()},
		"doctor":      {1, "", "count(*) >= 0", "", false, says("t")},
		"version":     {1, "", "ratelimit_version ~ '^[0-9]+[.][0-9]+'", "", false, says("t")},
		"shard":       {1, "", "shard, of", "", false, says()},

		"define_shard": {0, "shard of:number", "", "anything", false, nil}, // once in a database
		"guard":        {0, "", "", "", false, nil},                        // a trigger
	}
	for _, f := range Functions {
		lists[f.Arguments] = listOf(f.Arguments)
	}
}

var nothing = []string{""} // what a function without columns returns

func says(rows ...string) func(*Call) ([]string, error) {
	return func(*Call) ([]string, error) { return rows, nil }
}

// A Kind of arguments has a type, what refuses a value, and literals to call with, parted by bars.
type Kind struct {
	Type    string
	Checks  []check
	Samples string
}

// arraySamples are those of an array of a kind.
var arraySamples = map[string]string{
	"charge": "'{1,2}'", "policy": "'{p,p}'", "key": "'{KEY,KEY.}'|'{KEY,KEY}'", "cost": "null|'{1,2}'|'{1,4000}'", "size": "null|'{1,1}'|'{2}'",
	"idempotency_key": "null|'{i1,i2}'|'{j1,j2}'",
}

// Samples are calls about policy p and the key KEY. The first has the first sample of each argument; then each has another in turn.
func (f Function) Samples(name string) (calls []string) {
	var first, options [][]string
	for _, a := range f.List() {
		samples := strings.Split(Kinds[a.Kind].Samples, "|")
		switch {
		case a.Array:
			samples = slices.DeleteFunc(strings.Split(arraySamples[a.Kind], "|"), func(s string) bool { return !a.Nullable && s == "null" })
		case a.Nullable && name != "override" && name != "define_policy":
			samples = append([]string{"null"}, samples...)
		case a.Nullable && !slices.Contains([]string{"capacity", "expires_at"}, a.Kind):
			samples = []string{"null"}
		}
		first, options = append(first, samples[:1]), append(options, samples)
	}
	verb := "select from "
	if strings.HasPrefix(f.Reads, "call") {
		verb = "call "
	}
	call := func(args [][]string) {
		calls = append(calls, verb+"ratelimit_"+name+"("+strings.Join(slices.Concat(args...), ", ")+")")
	}
	call(first)
	for i, samples := range options {
		for n := range samples[1:] {
			args := slices.Clone(first)
			args[i] = samples[n+1 : n+2]
			call(args)
		}
	}
	return calls
}

// A check is made in the order of its rank among those of all arguments of a call.
type check struct {
	rank int
	fits func(value any) bool
}

func isName(value any) bool {
	name, ok := value.(string)
	return ok && 1 <= len(name) && len(name) <= 512
}

func between(least, most int64) func(any) bool {
	return func(value any) bool {
		n, ok := value.(int64)
		return ok && least <= n && n <= most
	}
}

func lasts(least, most int64) func(any) bool {
	return func(value any) bool {
		s, ok := value.(Span)
		return ok && s.Months == 0 && s.inMonthsOf30Days().Cmp(big.NewInt(least)) >= 0 && s.inMonthsOf30Days().Cmp(big.NewInt(most)) <= 0
	}
}

var Kinds = map[string]Kind{
	"policy":          {"text", []check{{1, isName}}, "'p'"},
	"key":             {"text", []check{{2, isName}}, "'KEY'"},
	"holder":          {"text", []check{{3, isName}}, "'h'"},
	"cost":            {"bigint", []check{{4, between(0, math.MaxInt64)}}, "2|5000"},
	"charge":          {"bigint", []check{{4, between(0, math.MaxInt64)}, {6, between(0, MaxTokens)}}, "2"},
	"slots":           {"bigint", []check{{4, between(1, math.MaxInt64)}}, "1"},
	"idempotency_key": {"text", []check{{5, isName}}, "'i1'|'j1'"},
	"granted":         {"text", []check{{5, func(value any) bool { return value == nil || isName(value) }}, {7, isName}}, "'i1'"},
	"at_most":         {"bigint", []check{{6, between(1, math.MaxInt64)}}, "2|20"},
	"at_least":        {"bigint", []check{{7, between(1, math.MaxInt64)}}, "1"},
	"max_wait":        {"interval", []check{{6, lasts(0, int64(MaxWaitOfReserve))}}, "'1 day'"},
	"pause_for":       {"interval", []check{{6, lasts(1000, int64(MaxWaitOfReserve))}}, "'1 ms'"},
	"capacity":        {"bigint", []check{{3, between(0, MaxTokens)}}, "20"},
	"refill":          {"bigint", []check{{3, between(0, MaxTokens)}}, "1"},
	"every":           {"interval", []check{{3, lasts(1, MaxSpan)}}, "'1 day'"},
	"remember":        {"interval", []check{{3, lasts(1, MaxSpan)}}, "'1 day'"},
	"expires_at":      {"timestamptz", nil, "'2099-01-01 UTC'"},
	"period":          {"interval", nil, "'1 day'"},
	"lease":           {"interval", nil, "'1 day'"},
	"history":         {"interval", nil, "'1 year'"},
	"since":           {"timestamptz", nil, "'2024-01-01'"},
	"until":           {"timestamptz", nil, "'2099-01-01'"},
	"settled":         {"boolean", nil, "true"},
	"time_zone":       {"text", nil, "'UTC'"},
	"anchor":          {"timestamp", nil, "'2024-01-01'"},
	"stepped":         {"boolean", nil, "true"},
	"durable":         {"boolean", nil, "true"},
	"shadow":          {"boolean", nil, "true"},
	"decision":        {"ratelimit.decision", nil, "'(f,0,00:00:09,00:01:00,10,f,f)'"},
	"max_rows":        {"integer", []check{{3, between(1, math.MaxInt32)}}, "10"},
	"shard":           {"integer", nil, "0"},
	"number":          {"integer", nil, "1"},
	"size":            {"integer", nil, "1"},
	"budget": {"interval", []check{{1, func(value any) bool {
		s, ok := value.(Span)
		return ok && s.inMonthsOf30Days().Sign() > 0
	}}}, "'1 second'"},
}

const (
	MaxTokens = 9_000_000_000_000
	MaxSpan   = 365_250 * Day // 1000 years
)

// A Span is an interval as PostgreSQL stores it.
type Span struct {
	Months, Days int32
	Us           int64
}

// inMonthsOf30Days is the length in microseconds by which PostgreSQL orders intervals.
func (s Span) inMonthsOf30Days() *big.Int {
	length := new(big.Int).Mul(big.NewInt(int64(s.Months)*30+int64(s.Days)), big.NewInt(Day))
	return length.Add(length, big.NewInt(s.Us))
}

// Micros is the length, or one that no rule allows where it is not fixed or too long.
func (s Span) Micros() model.Micros {
	if length := s.inMonthsOf30Days(); s.Months == 0 && length.IsInt64() {
		return model.Micros(length.Int64())
	}
	return math.MinInt64
}

// SpanOf has whole days as such.
func SpanOf(m model.Micros) Span { return Span{Days: int32(m / Day), Us: int64(m % Day)} }

// An Instant is a timestamptz, or a timestamp as if in UTC, in microseconds of the Unix epoch.
type Instant int64

const (
	Infinity         Instant = math.MaxInt64
	NegativeInfinity Instant = math.MinInt64
)

// A Call is one of a function to a model. An argument is nil, a string, int64, bool, Span, Instant, []*string or []*int64.
type Call struct {
	Function string
	Args     []any
	Model    *model.Model
	Now      time.Time
	OneKey   bool // a request of several keys is refused, as by Citus

	Told  []Decision // by the answer; of a hold HeldFor is ResetAfter
	Codes []string   // of the requests of a batch that gets as far as them: the SQLSTATE of each
}

// Answer makes the call on the model. It returns the rows of columns parted by bars, or the refusal: by the arguments alone, in the order
// in which the functions check them, or else by what was there before.
func (c *Call) Answer() ([]string, error) {
	f := Functions[c.Function]
	if err := c.check(f); err != nil {
		return nil, err
	}
	rows, err := f.Foretell(c)
	if errors.Is(err, model.InvalidArgument) {
		err = refusal("")
		if !f.Quiet { // or else the policy is of another kind
			err = refusal("invalid policy")
		}
	}
	return rows, err
}

// Refused reports whether the call is refused by its arguments alone.
func (c *Call) Refused() bool { return c.check(Functions[c.Function]) != nil }

func (c *Call) check(f Function) error {
	type ranked struct {
		check
		i int
	}
	var all []ranked
	arguments := f.List()
	for i, a := range arguments {
		switch {
		case a.Array:
			all = append(all, ranked{check{i, func(value any) bool { return a.Nullable && value == nil || c.fitsBatch(a, value) }}, i})
		case !a.Nullable || c.Args[i] != nil:
			for _, of := range Kinds[a.Kind].Checks {
				all = append(all, ranked{of, i})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b ranked) int { return cmp.Compare(a.rank, b.rank) })
	for _, r := range all {
		switch {
		case r.fits(c.Args[r.i]):
		case f.Quiet:
			return refusal("")
		default:
			return refusal("invalid " + arguments[r.i].Name)
		}
	}
	return nil
}

// fitsBatch reports whether an array has an element for each of the policies, or of the requests.
func (c *Call) fitsBatch(a Argument, value any) bool {
	sizes, haveSizes := c.sizes()
	n := length(c.Args[0])
	switch {
	case a.Kind == "size":
		return haveSizes && addUp(sizes, n)
	case a.Kind == "idempotency_key" && haveSizes:
		return length(value) == len(sizes)
	}
	return n >= 0 && length(value) == n
}

func (c *Call) sizes() ([]*int64, bool) {
	for i, a := range Functions[c.Function].List() {
		if a.Kind == "size" {
			sizes, ok := c.Args[i].([]*int64)
			return sizes, ok
		}
	}
	return nil, false
}

func length(array any) int {
	switch array := array.(type) {
	case []*string:
		return len(array)
	case []*int64:
		return len(array)
	}
	return -1
}

func addUp(sizes []*int64, sum int) bool {
	var total int64
	for _, size := range sizes {
		if size == nil || *size < 0 {
			return false
		}
		total += *size
	}
	return total == int64(sum)
}

// A refusal is the message of a 22023. The empty one stands for any.
type refusal string

func (r refusal) Error() string { return string(r) }

const (
	limitExceeded model.Error = "RL429" // in place of a denial
	severalKeys   model.Error = "0A000" // of buckets that have several keys, on Citus
)

// Both have the SQLSTATE of another error. The second is of Citus.
var (
	errHeldOtherwise = errors.New("the holder holds with another cost")
	errUsageOfNodes  = errors.New("usage is not listed on Citus")
)

// Refusal returns the SQLSTATE and the message of an error of Answer, where it is foretold.
func Refusal(err error) (code, message string) {
	argument, isInvalid := errors.AsType[refusal](err)
	switch {
	case isInvalid:
		return "22023", string(argument)
	case errors.Is(err, errHeldOtherwise):
		return "RL002", errHeldOtherwise.Error()
	case errors.Is(err, errUsageOfNodes):
		return string(severalKeys), errUsageOfNodes.Error()
	}
	var other model.Error
	errors.As(err, &other)
	return string(other), map[model.Error]string{
		model.UnknownPolicy:       "unknown policy",
		model.IdempotencyMismatch: "idempotency key used before with another cost",
		model.Settled:             "the grant under this idempotency key was settled",
		model.NoGrant:             "no live grant under this idempotency key",
		limitExceeded:             "rate limit exceeded",
		severalKeys:               "the buckets of a request must have one key",
	}[other]
}

func (c *Call) text(i int) string { s, _ := c.Args[i].(string); return s }

func (c *Call) num(i int) int64 { return c.Args[i].(int64) }

func (c *Call) bucket() model.BucketID { return model.BucketID{Policy: c.text(0), Key: c.text(1)} }

// pointerTo is nil for null.
func pointerTo[T any](value any) *T {
	if v, ok := value.(T); ok {
		return &v
	}
	return nil
}

func (c *Call) micros(i int) *model.Micros {
	if s, ok := c.Args[i].(Span); ok {
		return new(s.Micros())
	}
	return nil
}

// numbers are capacity, refill and every, and from another place on time_zone, anchor and lease.
func (c *Call) numbers(i, calendar int) model.Numbers {
	n := model.Numbers{
		Capacity: pointerTo[int64](c.Args[i]), Refill: pointerTo[int64](c.Args[i+1]), Every: c.micros(i + 2),
		Zone: pointerTo[string](c.Args[calendar]), Lease: c.micros(calendar + 2),
	}
	if at, ok := c.Args[calendar+1].(Instant); ok {
		n.Anchor = new(at.time())
	}
	return n
}

func (at Instant) time() time.Time { return time.UnixMicro(int64(at)).UTC() }

// period is one that no rule allows where an interval is not of whole days or whole months.
func (c *Call) period(i int) *model.Period {
	s, ok := c.Args[i].(Span)
	switch {
	case !ok:
		return nil
	case s.Us != 0 || s == Span{}:
		return &model.Period{Days: -1}
	}
	return &model.Period{Months: int(s.Months), Days: int(s.Days)}
}

// history is a period, or none where it is 0.
func (c *Call) history(i int) *model.Period {
	if s, ok := c.Args[i].(Span); ok && s.inMonthsOf30Days().Sign() == 0 {
		return &model.Period{}
	}
	return c.period(i)
}

func (c *Call) bound(i int) *time.Time {
	if at, ok := c.Args[i].(Instant); ok {
		return new(at.time())
	}
	return nil
}

func (c *Call) expires(i int) (expires time.Time) {
	if at, ok := c.Args[i].(Instant); ok && at != Infinity {
		expires = at.time()
	}
	return expires
}

// decided is the row of a decision, or one that says something else of it.
func (c *Call) decided(d Decision, err error, row ...string) ([]string, error) {
	if err == nil || errors.Is(err, limitExceeded) {
		c.Told = append(c.Told, d)
	}
	return append(row, inColumns(d))[:1], err
}

func (c *Call) flag(is bool, err error) ([]string, error) {
	return c.decided(Decision{Allowed: is}, err, letter[is])
}

// listed are the rows of a list of a policy, or of all, up to the number that an argument has.
func (c *Call) listed(rows []string, most int, err error) ([]string, error) {
	if err != nil {
		return nil, err
	}
	if _, known := c.Model.Policy(c.text(0)); c.Args[0] != nil && !known {
		return nil, model.UnknownPolicy
	}
	return rows[:min(int64(len(rows)), c.num(most))], nil
}

var letter = map[bool]string{true: "t", false: "f"}

// inColumns is a decision as the functions about one bucket return it.
func inColumns(d Decision) string {
	return fmt.Sprintf("%s|%d|%s|%s|%d|%s|%s", letter[d.Allowed], d.Remaining, orNothing(d.RetryAfter), orNothing(d.ResetAfter), d.Capacity,
		letter[d.Replayed], letter[d.Shadowed])
}

// orNothing is empty for never, as null is.
func orNothing(m model.Micros) string {
	if m == model.Never {
		return ""
	}
	return strconv.FormatInt(int64(m), 10)
}

func wholeInColumns(w Whole) string {
	return fmt.Sprintf("%s|%d|%s", inColumns(w.Decision), w.Binding, decisionsInColumns(w.Decisions))
}

func decisionsInColumns(decisions []Decision) string {
	columns := make([]string, len(decisions))
	for i, d := range decisions {
		columns[i] = inColumns(d)
	}
	return strings.Join(columns, "; ")
}

// A request is one of a batch; anything of it may be null or bad.
type request struct {
	charges        []charge
	idempotencyKey any
}

type charge struct{ policy, key, cost any }

// charges join arrays of policies, keys and costs.
func (c *Call) charges(costsAt int) (all []charge) {
	policies, keys := c.Args[0].([]*string), c.Args[1].([]*string)
	costs, haveCosts := c.Args[costsAt].([]*int64)
	for i := range policies {
		of := charge{valueOf(policies[i]), valueOf(keys[i]), int64(1)}
		if haveCosts {
			of.cost = valueOf(costs[i])
		}
		all = append(all, of)
	}
	return all
}

// valueOf is nil for null.
func valueOf[T any](p *T) any {
	if p == nil {
		return nil
	}
	return *p
}

// requests are the charges cut by the sizes, or one each, and the idempotency keys.
func (c *Call) requests() (all []request) {
	charges, single := c.charges(2), int64(1)
	sizes, haveSizes := c.sizes()
	if !haveSizes {
		sizes = slices.Repeat([]*int64{&single}, len(charges))
	}
	var idempotencyKeys []*string
	for i, a := range Functions[c.Function].List() {
		if a.Kind == "idempotency_key" {
			idempotencyKeys, _ = c.Args[i].([]*string)
		}
	}
	for i, size := range sizes {
		q := request{charges: charges[:*size]}
		charges = charges[*size:]
		if idempotencyKeys != nil {
			q.idempotencyKey = valueOf(idempotencyKeys[i])
		}
		all = append(all, q)
	}
	return all
}

func (c *Call) whole(q request) (Whole, error) {
	if len(q.charges) < 1 || len(q.charges) > 1000 || q.idempotencyKey != nil && !isName(q.idempotencyKey) {
		return Whole{}, refusal("")
	}
	var charges []model.Charge
	var err error
	for _, of := range q.charges {
		cost, ok := of.cost.(int64)
		if !isName(of.policy) || !isName(of.key) || !ok || cost < 0 {
			return Whole{}, refusal("")
		}
		charges = append(charges, ChargeOf(of.policy.(string), of.key.(string), cost))
		if _, known := c.Model.Policy(of.policy.(string)); !known {
			err = cmp.Or(err, error(model.UnknownPolicy))
		}
		if c.OneKey && of.key != q.charges[0].key {
			err = severalKeys
		}
	}
	if errors.Is(err, severalKeys) {
		return Whole{}, err
	}
	idempotencyKey, _ := q.idempotencyKey.(string)
	w, err := c.Model.AcquireAll(c.Now, charges, idempotencyKey)
	if errors.Is(err, model.InvalidArgument) {
		err = refusal("")
	}
	if err == nil {
		c.Told = append(append(c.Told, w.Decision), w.Decisions...)
	}
	return w, err
}

func (c *Call) settled() ([]string, error) {
	var settlements []model.Charge
	charges := c.charges(3)
	for _, of := range charges {
		cost, ok := of.cost.(int64)
		if !isName(of.policy) || !isName(of.key) || !ok || cost < 0 || cost > MaxTokens {
			return nil, refusal("")
		}
		settlements = append(settlements, ChargeOf(of.policy.(string), of.key.(string), cost))
	}
	if len(charges) < 1 || len(charges) > 1000 {
		return nil, refusal("")
	}
	before := c.Model
	if c.OneKey && slices.ContainsFunc(settlements, func(of model.Charge) bool { return of.Key != settlements[0].Key }) {
		before = before.Clone()
	}
	replayed, decisions, _, err := before.SettleAll(c.Now, settlements, c.text(2))
	if before != c.Model && !errors.Is(err, model.InvalidArgument) {
		err = severalKeys
	}
	if err != nil {
		return nil, err
	}
	c.Told = append(c.Told, decisions...)
	return []string{letter[replayed] + "|" + decisionsInColumns(decisions)}, nil
}

func (c *Call) wholes() (rows []string, err error) {
	_, haveSizes := c.sizes()
	for i, q := range c.requests() {
		w, err := c.whole(q)
		code, message := Refusal(err)
		c.Codes = append(c.Codes, code)
		columns := "||||||||" // none
		switch {
		case err == nil && haveSizes:
			columns = wholeInColumns(w)
		case err == nil:
			columns = inColumns(w.Decision) + "||"
		}
		rows = append(rows, fmt.Sprintf("%d|%s|%s|%s", i+1, code, message, columns))
	}
	return rows, nil
}

// packed has the rows that the statement makes of the arrays.
func (c *Call) packed() ([]string, error) {
	var elements, refusals, requests []string
	var element int
	var replayed, shadowed bool
	_, haveSizes := c.sizes()
	for i, q := range c.requests() {
		w, err := c.whole(q)
		code, message := Refusal(err)
		c.Codes = append(c.Codes, code)
		if err != nil {
			element += len(q.charges)
			refusals = append(refusals, fmt.Sprintf("refused|%d|%s|%s", i+1, code, message))
			continue
		}
		for _, d := range w.Decisions {
			element++
			elements = append(elements, fmt.Sprintf("element|%d|%s", element, inColumns(d)))
			replayed = replayed || d.Replayed
			shadowed = shadowed || d.Shadowed
		}
		if haveSizes {
			requests = append(requests, fmt.Sprintf("request|%d|%s|%s|%s|%d", i+1, letter[w.Allowed], letter[w.Replayed], letter[w.Shadowed], w.Binding))
		}
	}
	return slices.Concat([]string{fmt.Sprintf("arrays|0|%s|%s", letter[!replayed], letter[!shadowed])}, elements, refusals, requests), nil
}

// calendarColumns are lease, time_zone and anchor, and refilling those of a policy that refills.
func calendarColumns(p model.Policy) string {
	switch {
	case p.IsSlots():
		return fmt.Sprintf("%d||", p.Lease)
	case p.IsQuota():
		return fmt.Sprintf("|%s|%d", p.Zone, p.Anchor.UnixMicro())
	}
	return "||"
}

func refilling(p model.Policy) string {
	if p.IsSlots() || p.IsQuota() {
		return "|"
	}
	return fmt.Sprintf("%d|%d", p.Refill, p.Every)
}

func policyRows(policies map[string]model.Policy) (rows []string) {
	for _, name := range slices.Sorted(maps.Keys(policies)) {
		p := policies[name]
		stepped, remember, period := letter[p.Stepped], fmt.Sprint(int64(p.Remember)), ""
		switch {
		case p.IsSlots():
			stepped, remember = "", ""
		case p.IsQuota():
			stepped, period = "", periodText(p.Period)
		}
		rows = append(rows, fmt.Sprintf("%s|%d|%s|%s|%s|%s|%s|%s|%s|%s", name, p.Capacity, refilling(p), stepped, letter[p.Durable], remember,
			letter[p.Shadow], period, calendarColumns(p), periodText(p.History)))
	}
	return rows
}

// periodText is a period as PostgreSQL writes it.
func periodText(p model.Period) string {
	var parts []string
	for _, part := range []struct {
		n    int
		unit string
	}{{p.Months / 12, "year"}, {p.Months % 12, "mon"}, {p.Days, "day"}} {
		switch part.n {
		case 0:
		case 1:
			parts = append(parts, "1 "+part.unit)
		default:
			parts = append(parts, fmt.Sprintf("%d %ss", part.n, part.unit))
		}
	}
	return strings.Join(parts, " ")
}

// overrideRows are those of a policy and a key, or of any, in the order of both, first what stays.
func (c *Call) overrideRows() (rows []string) {
	all := c.Model.Overrides()
	for _, id := range c.inOrder(slices.Collect(maps.Keys(all)), 0, 1) {
		rows = append(rows, partRows(id, all[id].Parts(c.Now))...)
	}
	return rows
}

func partRows(id model.BucketID, parts []model.Override) (rows []string) {
	for _, o := range parts {
		n, zone, expires := o.Stays, "", ""
		if !o.Expires.IsZero() {
			n, expires = o.Ends, strconv.FormatInt(o.Expires.UnixMicro(), 10)
		}
		if n.Zone != nil {
			zone = *n.Zone
		}
		var anchor *int64
		if n.Anchor != nil {
			anchor = new(n.Anchor.UnixMicro())
		}
		rows = append(rows, strings.Join([]string{id.Policy, id.Key, orNull(n.Capacity), orNull(n.Refill), orNull(n.Every), expires,
			orNull(n.Lease), zone, orNull(anchor)}, "|"))
	}
	return rows
}

// orNull is empty for null.
func orNull[N ~int64](n *N) string {
	if n == nil {
		return ""
	}
	return strconv.FormatInt(int64(*n), 10)
}

// inOrder are the buckets of the policy and the key in these arguments, where null is any.
func (c *Call) inOrder(ids []model.BucketID, policy, key int) []model.BucketID {
	ids = slices.DeleteFunc(ids, func(id model.BucketID) bool {
		return c.Args[policy] != nil && c.Args[policy] != id.Policy || c.Args[key] != nil && c.Args[key] != id.Key
	})
	return BucketsInOrder(ids)
}

func BucketsInOrder(ids []model.BucketID) []model.BucketID {
	return slices.SortedFunc(slices.Values(ids), func(a, b model.BucketID) int {
		return cmp.Or(strings.Compare(a.Policy, b.Policy), strings.Compare(a.Key, b.Key))
	})
}

// statusRows are those of a policy and a key, or of any, the emptiest bucket first.
func (c *Call) statusRows() (rows []string) {
	type line struct {
		share *big.Rat
		row   string
	}
	var lines []line
	ids := c.Model.Buckets()
	for _, h := range c.Model.Holders(c.Now, nil, nil) {
		if !slices.Contains(ids, h.BucketID) {
			ids = append(ids, h.BucketID)
		}
	}
	for _, id := range c.inOrder(ids, 0, 2) {
		level, p := c.Model.Level(c.Now, id)
		o, ok := c.Model.Overrides()[id]
		reset, _ := c.Model.Peek(c.Now, id, 0)
		token, _ := c.Model.Peek(c.Now, id, 1)
		if p.IsSlots() {
			level = big.NewInt(reset.Remaining * 1_000_000)
		}
		lines = append(lines, line{
			new(big.Rat).SetFrac(level, big.NewInt(max(1, reset.Capacity*1_000_000))),
			fmt.Sprintf("%s|%s|%d|%s|%s|%d|%s", id.Policy, id.Key, reset.Remaining, orNothing(token.RetryAfter), orNothing(reset.ResetAfter),
				reset.Capacity, letter[ok && o.Live(c.Now)]),
		})
	}
	slices.SortStableFunc(lines, func(a, b line) int { return a.share.Cmp(b.share) })
	for _, l := range lines {
		rows = append(rows, l.row)
	}
	return rows
}
