package kit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

// A WholeRequest charges several buckets, all or none.
type WholeRequest struct {
	Charges        []model.Charge
	IdempotencyKey string // empty for none
}

func ChargeOf(policy, key string, cost int64) model.Charge {
	return model.Charge{BucketID: model.BucketID{Policy: policy, Key: key}, Cost: cost}
}

// Single is a request of one charge as ratelimit_acquire takes it.
func (r WholeRequest) Single() Request {
	return Request{r.Charges[0].BucketID, r.Charges[0].Cost, r.IdempotencyKey}
}

type Whole = model.Whole

// WholeOf is the answer to a request of one charge.
func WholeOf(d Decision) Whole { return Whole{Decision: d, Binding: 1, Decisions: []Decision{d}} }

// A WholeAnswer is a whole, or the error in its place.
type WholeAnswer struct {
	Whole *Whole
	Error string // SQLSTATE, message, detail and hint
}

// wholeArrays are requests as arguments. Arrays that hold nothing but the default are nil.
type wholeArrays struct {
	policies, Keys  []string
	costs           []int64
	sizes           []int32
	idempotencyKeys []*string
}

func arraysOf(requests []WholeRequest) (a wholeArrays) {
	var cost, keyed bool
	for _, r := range requests {
		for _, c := range r.Charges {
			a.policies = append(a.policies, c.Policy)
			a.Keys = append(a.Keys, c.Key)
			a.costs = append(a.costs, c.Cost)
			cost = cost || c.Cost != 1
		}
		a.sizes = append(a.sizes, int32(len(r.Charges)))
		a.idempotencyKeys = append(a.idempotencyKeys, nullable(r.IdempotencyKey))
		keyed = keyed || r.IdempotencyKey != ""
	}
	if !cost {
		a.costs = nil
	}
	if !keyed {
		a.idempotencyKeys = nil
	}
	return a
}

// wholeColumns are those of a whole d.
const wholeColumns = decisionColumns + `, d.binding,
	(select json_agg(json_build_object(
	          'Allowed', e.allowed, 'Remaining', e.remaining,
	          'RetryAfter', (extract(epoch from e.retry_after) * 1000000)::bigint,
	          'ResetAfter', (extract(epoch from e.reset_after) * 1000000)::bigint,
	          'Capacity', e.capacity, 'Replayed', e.replayed, 'Shadowed', e.shadowed) order by e.n)
	   from unnest(d.decisions) with ordinality
	        as e (allowed, remaining, retry_after, reset_after, capacity, replayed, shadowed, n))`

// A wholeRow is scanned from wholeColumns, which are null where there is an error.
type wholeRow struct {
	decisionRow
	Binding   *int
	Decisions []decisionRow
}

func (r *wholeRow) fields() []any { return append(r.decisionRow.fields(), &r.Binding, &r.Decisions) }

func (r *wholeRow) whole() *Whole {
	if r.Allowed == nil {
		return nil
	}
	w := &Whole{Decision: *r.Decision(), Binding: *r.Binding}
	for _, d := range r.Decisions {
		w.Decisions = append(w.Decisions, *d.Decision())
	}
	return w
}

// AcquireAll sends a request in a call of its own.
func (r WholeRequest) AcquireAll(q Querier) (Whole, error) {
	a := arraysOf([]WholeRequest{r})
	var row wholeRow
	err := q.QueryRow(context.Background(), "select "+wholeColumns+" from ratelimit_acquire_all($1, $2, $3, $4) as d",
		a.policies, a.Keys, a.costs, nullable(r.IdempotencyKey)).Scan(row.fields()...)
	if err != nil {
		return Whole{}, err
	}
	w := row.whole()
	if w == nil {
		return Whole{}, errors.New("no decision")
	}
	return *w, nil
}

// By sends the request through a limiter of the client.
func (r WholeRequest) By(ctx context.Context, limiter client.Acquirer) (Whole, error) {
	var charges []client.Charge
	for _, c := range r.Charges {
		charges = append(charges, client.Charge{Policy: c.Policy, Key: c.Key, Cost: client.Cost(c.Cost)})
	}
	var opts []client.CallOption
	if r.IdempotencyKey != "" {
		opts = append(opts, client.IdempotencyKey(r.IdempotencyKey))
	}
	d, err := limiter.AcquireAll(ctx, charges, opts...)
	w := Whole{Decision: DecisionOf(d.Decision), Binding: d.Binding + 1}
	for _, d := range d.Decisions {
		w.Decisions = append(w.Decisions, DecisionOf(d))
	}
	return w, err
}

// AcquireManyWithSizes sends requests in one ratelimit_acquire_many.
func AcquireManyWithSizes(q Querier, requests []WholeRequest) ([]WholeAnswer, error) {
	a := arraysOf(requests)
	rows, err := q.Query(context.Background(), "select d.request, "+wholeColumns+`,
		       concat_ws(': ', d.error_code, d.error_message, d.error_detail, d.error_hint)
		  from ratelimit_acquire_many($1, $2, $3, $4, $5) as d`, a.policies, a.Keys, a.costs, a.idempotencyKeys, a.sizes)
	if err != nil {
		return nil, err
	}
	var number int64
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (answer WholeAnswer, err error) {
		var request int64
		var r wholeRow
		err = row.Scan(slices.Concat([]any{&request}, r.fields(), []any{&answer.Error})...)
		if number++; err == nil && request != number {
			err = fmt.Errorf("row %d answers request %d", number, request)
		}
		answer.Whole = r.whole()
		return answer, err
	})
}

// AcquireManyWholes sends requests of one charge.
func AcquireManyWholes(q Querier, requests []WholeRequest) ([]WholeAnswer, error) {
	var singles []NullableRequest
	for _, r := range requests {
		singles = append(singles, r.Single().Nullable())
	}
	answers, err := AcquireMany(q, singles)
	var wholes []WholeAnswer
	for _, a := range answers {
		if a.Decision == nil {
			wholes = append(wholes, WholeAnswer{Error: a.Error})
			continue
		}
		w := WholeOf(*a.Decision)
		wholes = append(wholes, WholeAnswer{Whole: &w})
	}
	return wholes, err
}

// A packed row is what ratelimit_acquire_packed answers, column by column.
type packed struct {
	Elements, Remaining        []int64
	RetryAfterUs, ResetAfterUs []*int64
	Capacity                   []int64
	Replayed, Shadowed         []bool // nil: none

	Requests                                            []int64 // nil without sizes
	RequestsAllowed, RequestsReplayed, RequestsShadowed []bool
	Bindings                                            []int

	Refused                                             []int64
	ErrorCodes, ErrorMessages, ErrorDetails, ErrorHints []*string
}

// AcquirePacked sends requests in one call that answers in arrays. Without sizes each has one charge.
func AcquirePacked(q Querier, requests []WholeRequest, sizes bool) ([]WholeAnswer, error) {
	a := arraysOf(requests)
	if !sizes {
		a.sizes = nil
	}
	rows, err := q.Query(context.Background(), `
		select elements, remaining, retry_after_us, reset_after_us, capacity, replayed, shadowed,
		 requests, requests_allowed, requests_replayed, requests_shadowed, bindings, refused, error_codes, error_messages, error_details, error_hints
		 from ratelimit_acquire_packed($1, $2, $3, $4, $5)`, a.policies, a.Keys, a.costs, a.sizes, a.idempotencyKeys)
	if err != nil {
		return nil, err
	}
	p, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[packed])
	if err != nil {
		return nil, err
	}
	return p.unpack(requests, sizes)
}

// unpack puts the answers in the order of the requests, and fails where arrays do not fit together.
func (p packed) unpack(requests []WholeRequest, sizes bool) ([]WholeAnswer, error) {
	decisions := map[int64]Decision{}
	for i, n := range p.Elements {
		retryAfter := OrNever(p.RetryAfterUs[i])
		decisions[n] = Decision{
			Allowed: retryAfter == 0, Remaining: p.Remaining[i], RetryAfter: retryAfter, ResetAfter: OrNever(p.ResetAfterUs[i]),
			Capacity: p.Capacity[i], Replayed: p.Replayed != nil && p.Replayed[i], Shadowed: p.Shadowed != nil && p.Shadowed[i],
		}
	}
	for _, flags := range [][]bool{p.Replayed, p.Shadowed} {
		if flags != nil && !slices.Contains(flags, true) {
			return nil, errors.New("an array says that no element is replayed, or shadowed, and should be null")
		}
	}
	decided := map[int64]Whole{} // by the number of the request
	switch {
	case !sizes && p.Requests != nil:
		return nil, errors.New("there were no sizes, and so should be no requests")
	case sizes:
		for i, n := range p.Requests {
			decided[n] = Whole{
				Decision: Decision{Allowed: p.RequestsAllowed[i], Replayed: p.RequestsReplayed[i], Shadowed: p.RequestsShadowed[i]},
				Binding:  p.Bindings[i],
			}
		}
	default:
		for n, d := range decisions {
			decided[n] = Whole{Decision: d, Binding: 1}
		}
	}
	refused := map[int64]string{}
	for i, n := range p.Refused {
		refused[n] = joined(p.ErrorCodes[i], p.ErrorMessages[i], p.ErrorDetails[i], p.ErrorHints[i])
	}
	var answers []WholeAnswer
	var element int64
	for i, r := range requests {
		w, isDecided := decided[int64(i)+1]
		message, isRefused := refused[int64(i)+1]
		for range r.Charges {
			element++
			d, ok := decisions[element]
			if ok != isDecided || ok == isRefused {
				return nil, fmt.Errorf("request %d: decided %v, refused %v, and element %d has a decision: %v", i+1, isDecided, isRefused, element, ok)
			}
			w.Decisions = append(w.Decisions, d)
		}
		if !isDecided {
			answers = append(answers, WholeAnswer{Error: message})
			continue
		}
		binding := w.Decisions[w.Binding-1]
		w.Remaining, w.ResetAfter, w.Capacity = binding.Remaining, binding.ResetAfter, binding.Capacity
		if !w.Allowed {
			w.RetryAfter = binding.RetryAfter
		}
		answers = append(answers, WholeAnswer{Whole: &w})
	}
	if int(element) < len(decisions) || len(decided)+len(refused) != len(requests) {
		return nil, fmt.Errorf("%d requests have %d decisions and %d errors", len(requests), len(decided), len(refused))
	}
	return answers, nil
}

// joined is what concat_ws(': ', …) makes of an error.
func joined(parts ...*string) string {
	var texts []string
	for _, part := range slices.DeleteFunc(parts, func(part *string) bool { return part == nil }) {
		texts = append(texts, *part)
	}
	return strings.Join(texts, ": ")
}
