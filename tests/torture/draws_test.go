package torture

import (
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
	"github.com/pgratelimit/pgratelimit/tests/kit"
)

// Drawn are random calls about few buckets. They repeat each other, and meet what the answers before them have made interesting.
type drawn struct {
	fuzzed
	*model.Model
	now      time.Time
	kinds    []string // of policies: bucket, quota, slots
	policies []string
	keys     []string
	ids      []string // idempotency keys
	holders  []string

	requests []kit.WholeRequest // the last ones
	instants []time.Time        // when something happens
	numbers  []int64            // of tokens
	waits    []model.Micros     // of reservations
	again    map[string][][]any // arguments of the last calls of a function
}

func newDrawn(random *rand.Rand) *drawn {
	return &drawn{fuzzed: fuzzed{random}, Model: model.New(), now: kit.T0, kinds: allKinds, policies: []string{"a", "b", "c"}, keys: []string{"x", "y"},
		ids: []string{"1", "2"}, holders: []string{"a", "b", "c", "d", "e"}, again: map[string][][]any{}}
}

var (
	allKinds   = []string{"bucket", "bucket", "quota", "slots"}
	tokensOnly = []string{"bucket", "bucket", "quota"}
	slotsOnly  = []string{"slots"}
)

// oneOfThese draws by one of several.
func oneOfThese[T any](f fuzzed, draws ...func() T) T { return oneOf(f, draws)() }

func one[T any](v T) func() T { return func() T { return v } }

// orNull is a value, or null once in n times.
func (d *drawn) orNull(n int, value any) any {
	if d.oneIn(n) {
		return nil
	}
	return value
}

func (d *drawn) upTo(n int64) func() int64 {
	return func() int64 { return d.Int64N(max(0, min(n, math.MaxInt64-1)) + 1) }
}

// magnitude is of every size as likely as of any other.
func (d *drawn) magnitude() int64 { return 1 + d.Int64N(1<<(1+d.IntN(43))) }

func (d *drawn) tokens() int64 {
	return oneOfThese(d.fuzzed, func() int64 { return 1 + d.Int64N(20) }, d.magnitude)
}

func (d *drawn) refill() int64 {
	if d.oneIn(4) {
		return 0
	}
	return min(kit.MaxTokens, d.tokens())
}

func (d *drawn) span() model.Micros {
	if d.oneIn(2) {
		return oneOf(d.fuzzed, []model.Micros{1, 3, 1_000, 1_000_000, 10_000_000, kit.Day / 24, kit.Day, 7 * kit.Day, 365250 * kit.Day})
	}
	return model.Micros(d.magnitude())
}

func (d *drawn) lease() model.Micros {
	if d.oneIn(2) {
		return oneOf(d.fuzzed, []model.Micros{1_000, 1_000_000, 60_000_000, 60_000_000, kit.Day, 365250 * kit.Day})
	}
	return max(1000, d.span())
}

func (d *drawn) period() kit.Span {
	switch d.IntN(3) {
	case 0:
		return oneOf(d.fuzzed, []kit.Span{{Days: 1}, {Days: 1}, {Days: 7}, {Months: 1}, {Months: 1}, {Months: 12}, {Months: 12_000}, {Days: 365_250}})
	case 1:
		return kit.Span{Days: 1 + int32(d.IntN(100))}
	}
	return kit.Span{Months: 1 + int32(d.IntN(100))}
}

// zone is seldom one: PostgreSQL looks for it for 25 ms. The time zone databases of the server and of this machine may be years apart, so
// it is none whose law has changed since 2025.
func (d *drawn) zone() any {
	if !d.oneIn(6) {
		return nil
	}
	return oneOf(d.fuzzed, []string{
		"UTC", "UTC", "Europe/Berlin", "Europe/Berlin", "America/New_York", "America/Los_Angeles", "America/Sao_Paulo", "Asia/Beirut",
		"Pacific/Auckland", "Pacific/Apia", "Australia/Lord_Howe", "Asia/Kathmandu", "GMT",
	})
}

// anchor is mostly about when the clock begins, on the eve of a change of clocks in Europe.
func (d *drawn) anchor() kit.Instant {
	day := oneOfThese(d.fuzzed, one(0), func() int { return d.IntN(141) - 70 }, func() int { return d.IntN(40_001) - 20_000 })
	odd := func() int { return oneOf(d.fuzzed, []int{-12 * 60, -9*60 - 30, -11*60 - 30}) }
	minutes := oneOfThese(d.fuzzed, one(0), odd, func() int { return d.IntN(1441) - 720 })
	return kit.Instant(kit.T0.AddDate(0, 0, day).Add(time.Duration(minutes) * time.Minute).UnixMicro())
}

// capacity of an override is mostly little, so that it shows.
func (d *drawn) little() int64 {
	return oneOfThese(d.fuzzed, d.upTo(20), func() int64 { return min(kit.MaxTokens, d.tokens()) })
}

func (d *drawn) definition(name string) []any {
	kind := oneOf(d.fuzzed, d.kinds)
	if p, known := d.Policy(name); known && !d.oneIn(8) {
		kind = kindOf(p)
	}
	args := []any{name, nil, nil, nil, nil, d.orNull(2, d.oneIn(2)), nil, d.orNull(2, d.oneIn(3)), nil, nil, nil, nil, nil}
	switch kind {
	case "bucket":
		args[1], args[2], args[3] = d.orNull(8, d.refill()), d.orNull(8, d.refill()), d.orNull(8, kit.SpanOf(d.span()))
		args[4], args[6] = d.orNull(2, d.oneIn(2)), d.orNull(2, kit.SpanOf(d.span()))
	case "quota":
		args[1], args[6], args[8] = d.orNull(8, oneOfThese(d.fuzzed, d.upTo(20), d.refill)), d.orNull(2, kit.SpanOf(d.span())), d.orNull(8, d.period())
		args[9], args[10] = d.zone(), d.orNull(2, d.anchor())
		if args[12] = d.orNull(3, oneOfThese(d.fuzzed, one(kit.Span{}), d.period, one(kit.Span{Months: 12}))); args[12] != nil {
			args[5] = d.orNull(2, true)
		}
	case "slots":
		args[1] = d.orNull(8, oneOfThese(d.fuzzed, func() int64 { return 1 + d.Int64N(9) }, func() int64 { return 1 + d.Int64N(9) }, d.upTo(10_001)))
		args[11] = d.orNull(8, kit.SpanOf(d.lease()))
	}
	return args
}

func kindOf(p model.Policy) string {
	switch {
	case p.IsQuota():
		return "quota"
	case p.IsSlots():
		return "slots"
	}
	return "bucket"
}

func (d *drawn) override(policy, key string) []any {
	p, _ := d.Policy(policy)
	kind := kindOf(p)
	if d.oneIn(8) {
		kind = oneOf(d.fuzzed, d.kinds)
	}
	args := []any{policy, key, d.orNull(8, d.little()), nil, nil, nil, nil, nil, nil}
	switch kind {
	case "bucket":
		args[3], args[4] = d.orNull(2, d.refill()), d.orNull(2, kit.SpanOf(d.span()))
	case "quota":
		args[6], args[7] = d.zone(), d.orNull(2, d.anchor())
	case "slots":
		args[2], args[8] = d.orNull(8, oneOfThese(d.fuzzed, d.upTo(9), d.upTo(10_001))), d.orNull(2, kit.SpanOf(d.lease()))
	}
	if d.oneIn(2) {
		after := oneOfThese(d.fuzzed, func() model.Micros { return model.Micros(d.IntN(3) - 1) }, d.span)
		expires := after.After(d.now)
		d.happens(expires, expires.Add(model.CleanUpMargin))
		args[5] = kit.Instant(expires.UnixMicro())
	}
	return args
}

func (d *drawn) amount(policy string) int64 {
	p, _ := d.Policy(policy)
	draws := []func() int64{d.upTo(3), d.upTo(p.Capacity), d.tokens}
	if len(d.numbers) > 0 {
		draws = append(draws, func() int64 { return oneOf(d.fuzzed, d.numbers) })
	}
	return oneOfThese(d.fuzzed, draws...)
}

// charge draws one of n in a request. A request of many should have some hope.
func (d *drawn) charge(n int) model.Charge {
	c := kit.ChargeOf(oneOf(d.fuzzed, d.policies), oneOf(d.fuzzed, d.keys), 0)
	if c.Cost = d.amount(c.Policy); n > 1 && !d.oneIn(3) {
		p, _ := d.Policy(c.Policy)
		c.Cost = oneOfThese(d.fuzzed, d.upTo(3), d.upTo(p.Capacity/int64(n)))
	}
	return c
}

func (d *drawn) id() string {
	if d.oneIn(2) {
		return ""
	}
	return oneOf(d.fuzzed, d.ids)
}

// request draws one of a single charge or, as often, of several: few buckets, some of them twice.
func (d *drawn) request(most int) kit.WholeRequest {
	n := 1
	if d.oneIn(2) {
		n = min(most, 2+d.IntN(5))
	}
	r := kit.WholeRequest{IdempotencyKey: d.id()}
	for range n {
		r.Charges = append(r.Charges, d.charge(n))
	}
	return r
}

// earlier draws a request that was made before, or one that is like it but for one thing.
func (d *drawn) earlier(most int) kit.WholeRequest {
	if len(d.requests) == 0 {
		return d.request(most)
	}
	r := oneOf(d.fuzzed, d.requests)
	charges := slices.Clone(r.Charges)
	i := d.IntN(len(charges))
	switch d.IntN(9) {
	case 0, 1: // the same
	case 2:
		charges = append(charges, d.charge(2))
	case 3: // too much more
		c := d.charge(2)
		if of, err := d.Peek(d.now, c.BucketID, 0); err == nil {
			c.Cost = max(c.Cost, of.Remaining+1)
		}
		charges = append(charges, c)
	case 4: // fewer
		if len(charges) > 1 {
			charges = slices.Delete(charges, i, i+1)
		}
	case 5:
		charges[i].Cost = d.amount(charges[i].Policy)
	case 6: // parts of the same sum
		part := d.upTo(charges[i].Cost)()
		charges[i].Cost -= part
		charges = append(charges, model.Charge{BucketID: charges[i].BucketID, Cost: part})
	case 7:
		slices.Reverse(charges)
	case 8:
		r.IdempotencyKey = d.id()
	}
	r.Charges = charges[:min(most, len(charges))]
	return r
}

// batch draws requests, some of them several times. A request may have several charges.
func (d *drawn) batch(most, charges int) (requests []kit.WholeRequest) {
	for range 1 + d.IntN(most) {
		r := d.request(charges)
		if d.oneIn(2) {
			r = d.earlier(charges)
		}
		for range 1 + d.IntN(3) {
			requests = append(requests, d.remember(r))
		}
	}
	return requests
}

// remember keeps a request for earlier.
func (d *drawn) remember(r kit.WholeRequest) kit.WholeRequest {
	d.requests = lastFew(append(d.requests, r))
	if p, ok := d.Policy(r.Charges[0].Policy); ok {
		d.happens(p.Remember.After(d.now), p.Remember.After(d.now).Add(model.CleanUpMargin))
	}
	return r
}

func (d *drawn) happens(at ...time.Time) { d.instants = lastFew(append(d.instants, at...)) }

// lastFew keeps the newest few elements.
func lastFew[T any](s []T) []T { return s[max(0, len(s)-8):] }

// saw remembers what decisions make interesting.
func (d *drawn) saw(function string, told []kit.Decision) {
	for _, of := range told[:min(4, len(told))] {
		for _, wait := range []model.Micros{of.RetryAfter, of.ResetAfter} {
			if wait != model.Never {
				d.happens(wait.After(d.now))
			}
		}
		if (of == kit.Decision{Allowed: of.Allowed, RetryAfter: of.RetryAfter, ResetAfter: of.ResetAfter}) { // which has no numbers
			continue
		}
		d.numbers = lastFew(append(d.numbers, of.Capacity, of.Capacity+1, max(0, of.Remaining), max(0, of.Remaining+1)))
		if function == "reserve" && of.RetryAfter != model.Never {
			d.waits = lastFew(append(d.waits, of.RetryAfter, max(0, of.RetryAfter-1)))
		}
	}
}

// good draws arguments of a call that should be accepted.
func (d *drawn) good(function string) (args []any) {
	arguments := kit.Functions[function].List()
	if calls := d.again[function]; len(calls) > 0 && d.oneIn(4) {
		return slices.Clone(oneOf(d.fuzzed, calls))
	}
	policy, key := oneOf(d.fuzzed, d.policies), oneOf(d.fuzzed, d.keys)
	switch {
	case function == "define_policy":
		return d.definition(policy)
	case function == "override":
		return d.override(policy, key)
	case len(arguments) > 0 && arguments[0].Array:
		return d.arrays(arguments)
	}
	for _, a := range arguments {
		if a.Nullable && a.Kind != "idempotency_key" && d.oneIn(3) {
			args = append(args, nil)
			continue
		}
		args = append(args, d.value(a.Kind, policy, key, args))
	}
	if function == "acquire" || function == "enforce" {
		r := kit.WholeRequest{Charges: []model.Charge{kit.ChargeOf(policy, key, args[2].(int64))}}
		r.IdempotencyKey, _ = args[3].(string)
		d.remember(r)
	}
	return args
}

// value draws an argument of a call about a bucket. Some depend on those before.
func (d *drawn) value(kind, policy, key string, before []any) any {
	switch kind {
	case "policy":
		return policy
	case "key":
		return key
	case "holder":
		return oneOf(d.fuzzed, d.holders)
	case "cost":
		return d.amount(policy)
	case "charge":
		amount := func() int64 { return min(kit.MaxTokens, d.amount(policy)) }
		return oneOfThese(d.fuzzed, d.upTo(2), amount, amount, one[int64](kit.MaxTokens))
	case "slots":
		return oneOfThese(d.fuzzed, func() int64 { return 1 + d.Int64N(3) }, one[int64](1), func() int64 { return d.Int64N(10_003) - 1 })
	case "idempotency_key":
		return d.orNull(2, oneOf(d.fuzzed, d.ids))
	case "granted":
		return oneOf(d.fuzzed, d.ids)
	case "at_most":
		return max(1, d.amount(policy))
	case "at_least":
		return oneOfThese(d.fuzzed, one[int64](1), func() int64 { return 1 + d.Int64N(before[2].(int64)) })
	case "max_wait":
		if len(d.waits) > 0 && d.oneIn(2) {
			return kit.SpanOf(min(kit.MaxWaitOfReserve, oneOf(d.fuzzed, d.waits)))
		}
		return kit.SpanOf(min(kit.MaxWaitOfReserve, oneOfThese(d.fuzzed, one[model.Micros](0), d.span)))
	case "pause_for": // mostly a time after which there is something to see
		if d.oneIn(2) {
			return kit.SpanOf(oneOf(d.fuzzed, []model.Micros{1_000, 1_001, 50_000, 1_000_000, 10_000_000, kit.Day}))
		}
		return kit.SpanOf(max(1000, min(kit.MaxWaitOfReserve, d.span())))
	case "settled":
		return d.oneIn(2)
	case "since", "until":
		return kit.Instant(d.now.Add(time.Duration(d.IntN(121)-60) * 24 * time.Hour).UnixMicro())
	case "max_rows":
		return int64(1 + d.IntN(20))
	case "budget":
		return oneOf(d.fuzzed, []kit.Span{{Us: 1}, {Days: 1, Us: -1}, {Months: 1}, {Months: math.MaxInt32, Days: math.MaxInt32}})
	}
	panic(kind)
}

// arrays draws the arguments of a function about many.
func (d *drawn) arrays(arguments []kit.Argument) []any {
	named := func(name string) bool {
		return slices.ContainsFunc(arguments, func(a kit.Argument) bool { return a.Name == name })
	}
	sized := named("sizes") && d.oneIn(2)
	most, charges := 5, 1
	if d.oneIn(16) {
		most = 200
	}
	if sized {
		charges = 6
	}
	requests := d.batch(most, charges)
	if named("idempotency_key") { // one request
		requests = requests[:1]
		if requests[0] = d.request(6); d.oneIn(2) {
			requests[0] = d.earlier(6)
		}
		d.remember(requests[0])
		if named("costs") && arguments[2].Kind == "granted" {
			requests[0] = d.settlement(requests[0])
		}
	}
	if sized && d.oneIn(3) {
		requests = slices.Insert(requests, d.IntN(len(requests)+1), kit.WholeRequest{})
	}
	return arraysOf(arguments, requests, sized)
}

// settlement is a request settled: at other costs, more often than not.
func (d *drawn) settlement(r kit.WholeRequest) kit.WholeRequest {
	r.Charges = slices.Clone(r.Charges)
	for i, c := range r.Charges {
		if !d.oneIn(3) {
			c.Cost = d.value("charge", c.Policy, c.Key, nil).(int64)
		}
		r.Charges[i].Cost = min(kit.MaxTokens, c.Cost)
	}
	if r.IdempotencyKey == "" {
		r.IdempotencyKey = oneOf(d.fuzzed, d.ids)
	}
	return r
}

// arraysOf are requests as the arguments of a function about many.
func arraysOf(arguments []kit.Argument, requests []kit.WholeRequest, sized bool) (args []any) {
	policies, keys, costs, ids, sizes := []*string{}, []*string{}, []*int64{}, []*string{}, []*int64{}
	plain, keyed := true, false
	for _, r := range requests {
		for _, c := range r.Charges {
			policies, keys, costs = append(policies, &c.Policy), append(keys, &c.Key), append(costs, &c.Cost)
			plain = plain && c.Cost == 1
		}
		sizes = append(sizes, new(int64(len(r.Charges))))
		var id *string
		if r.IdempotencyKey != "" {
			id, keyed = &r.IdempotencyKey, true
		}
		ids = append(ids, id)
	}
	for _, a := range arguments {
		var value any
		switch a.Kind {
		case "policy":
			value = policies
		case "key":
			value = keys
		case "cost":
			if !plain {
				value = costs
			}
		case "charge":
			value = costs
		case "granted":
			value = *ids[0]
		case "size":
			if sized {
				value = sizes
			}
		case "idempotency_key":
			switch {
			case !a.Array && keyed:
				value = *ids[0]
			case a.Array && keyed:
				value = ids
			}
		}
		args = append(args, value)
	}
	return args
}

// spoilt draws arguments each of which may be any of its type: once in n times, or never if n is 0.
func (d *drawn) spoilt(function string, n int) (args []argument) {
	values, arguments := d.good(function), kit.Functions[function].List()
	if n > 0 { // or else one refusal would hide another
		n = max(n, len(arguments))
	}
	for i, a := range arguments {
		of, spoil := kit.Kinds[a.Kind].Type, func() bool { return n > 0 && d.oneIn(n) }
		switch {
		case a.Array:
			args = append(args, d.array(a, values[i], spoil))
		case spoil():
			args = append(args, d.any(of, d.now))
		default:
			args = append(args, encode(of, values[i]))
		}
	}
	if n > 0 && function == "acquire_all" && d.oneIn(16) {
		args = d.manyCharges()
	}
	return args
}

// array encodes an argument. A spoilt one is null, no array, of another length, or has elements that are.
func (d *drawn) array(a kit.Argument, value any, spoil func() bool) argument {
	switch values := value.(type) {
	case []*string:
		return spoiltArray(d, kit.Kinds[a.Kind].Type, slices.Clone(values), spoil)
	case []*int64:
		return spoiltArray(d, kit.Kinds[a.Kind].Type, slices.Clone(values), spoil)
	}
	return null
}

func spoiltArray[T any](d *drawn, of string, values []*T, spoil func() bool) argument {
	if spoil() {
		switch d.IntN(12) {
		case 0:
			return null
		case 1:
			return d.noArray()
		case 2:
			values = values[:d.IntN(len(values)+1)]
		case 3:
			values = append(values, values...)
		}
	}
	for i := range values {
		for spoil() {
			if e := d.any(of, d.now); len(e.unreadable) == 0 && len(e.text) <= 2000 {
				if values[i] = nil; e.value != nil {
					values[i] = new(e.value.(T))
				}
				break
			}
		}
	}
	return arrayArgument(values, of, d.shapeFor(len(values)))
}

// manyCharges are those of a request that has about as many as it may.
func (d *drawn) manyCharges() []argument {
	n := oneOf(d.fuzzed, []int{0, 7, 30, 1000, 1001})
	r := kit.WholeRequest{Charges: slices.Repeat([]model.Charge{kit.ChargeOf(oneOf(d.fuzzed, d.policies), d.keys[0], 1)}, n)}
	return d.encodedArgs("acquire_all", arraysOf(kit.Functions["acquire_all"].List(), []kit.WholeRequest{r}, false))
}

// name draws an acceptable one.
func (f fuzzed) name() string {
	for {
		a := f.anyText()
		if s, _ := a.value.(string); 1 <= len(s) && len(s) <= 512 && len(a.unreadable) == 0 && !strings.Contains(s, "\x00") {
			return s
		}
	}
}
