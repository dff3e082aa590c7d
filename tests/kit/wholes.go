package kit

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

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

type Whole = model.Whole

// A WholeAnswer is a whole, or the error in its place.
type WholeAnswer struct {
	Whole *Whole
	Error string // SQLSTATE, message, detail and hint
}

// arraysOf are requests as arguments of a function about many: policies, keys, costs, sizes and idempotency keys by their names. Arrays
// that hold nothing but the default are null.
func arraysOf(requests []WholeRequest) map[string]any {
	var policies, keys []string
	var costs []*int64
	var sizes []int32
	var idempotencyKeys []*string
	for _, r := range requests {
		for _, c := range r.Charges {
			policies, keys, costs = append(policies, c.Policy), append(keys, c.Key), append(costs, &c.Cost)
		}
		sizes, idempotencyKeys = append(sizes, int32(len(r.Charges))), append(idempotencyKeys, nullable(r.IdempotencyKey))
	}
	a := map[string]any{"policies": policies, "keys": keys, "costs": costs, "sizes": sizes, "idempotency_keys": idempotencyKeys}
	dropDefaults(a)
	return a
}

// dropDefaults drops costs that are all 1, and idempotency keys that are all null.
func dropDefaults(a map[string]any) {
	if !slices.ContainsFunc(a["costs"].([]*int64), func(c *int64) bool { return c == nil || *c != 1 }) {
		delete(a, "costs")
	}
	if !slices.ContainsFunc(a["idempotency_keys"].([]*string), func(k *string) bool { return k != nil }) {
		delete(a, "idempotency_keys")
	}
}

// wholeOf reads the columns of a whole as the call table has them; nil where there is an error.
func wholeOf(columns []string) *Whole {
	d := decisionOf(columns)
	if d == nil {
		return nil
	}
	w := &Whole{Decision: *d}
	w.Binding, _ = strconv.Atoi(columns[7]) // empty without sizes
	for _, text := range strings.Split(columns[8], "; ") {
		if d := decisionOf(strings.Split(text, "|")); d != nil {
			w.Decisions = append(w.Decisions, *d)
		}
	}
	return w
}

func (r WholeRequest) AcquireAll(q Querier) (Whole, error) {
	a := arraysOf([]WholeRequest{r})
	a["idempotency_key"] = nullable(r.IdempotencyKey)
	rows, err := tableRows(q, Functions["acquire_all"].Statement("acquire_all"), ArgsOf("acquire_all", a))
	if err != nil {
		return Whole{}, err
	}
	return *wholeOf(rows[0]), nil
}

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
	rows, err := manyRows(q, ArgsOf("acquire_many", arraysOf(requests)))
	var answers []WholeAnswer
	for _, columns := range rows {
		answers = append(answers, WholeAnswer{wholeOf(columns[1:]), columns[0]})
	}
	return answers, err
}

// manyRows are the answers of ratelimit_acquire_many in the order of the requests: an error, and the columns of a whole.
func manyRows(q Querier, args []any) ([][]string, error) {
	f := Functions["acquire_many"]
	statement := strings.Replace(f.Statement("acquire_many"), "error_code, case when error_code <> '22023' then error_message end",
		"concat_ws(': ', error_code, error_message, error_detail, error_hint)", 1)
	rows, err := tableRows(q, statement, args)
	for i := range rows {
		if rows[i][0] != strconv.Itoa(i+1) {
			err = errors.Join(err, fmt.Errorf("row %d answers request %s", i+1, rows[i][0]))
		}
		rows[i] = rows[i][1:]
	}
	return rows, err
}

// AcquirePacked sends requests in one call that answers in arrays, which the model compares. Without sizes each has one charge.
func AcquirePacked(q Querier, requests []WholeRequest, sizes bool) (answers []WholeAnswer, err error) {
	a := arraysOf(requests)
	if !sizes {
		delete(a, "sizes")
	}
	f := Functions["acquire_packed"]
	statement := strings.NewReplacer("format('%s|%s', u.code, case when u.code <> '22023' then u.message end)", "concat_ws(': ', u.code, u.message, u.detail, u.hint)",
		"p.error_messages) as u (n, code, message)", "p.error_messages, p.error_details, p.error_hints) as u (n, code, message, detail, hint)").
		Replace(f.Statement("acquire_packed"))
	rows, err := tableRows(q, statement, ArgsOf("acquire_packed", a))
	told := map[string][]string{} // by kind and number
	for _, columns := range rows {
		told[columns[0]+columns[1]] = strings.Split(columns[2], "|")
	}
	element := 0
	for i, r := range requests {
		if refused := told[fmt.Sprint("refused", i+1)]; refused != nil || err != nil {
			element += len(r.Charges)
			answers = append(answers, WholeAnswer{Error: strings.Join(refused, "|")})
			continue
		}
		w := &Whole{Binding: 1}
		for range r.Charges {
			element++
			w.Decisions = append(w.Decisions, *decisionOf(told[fmt.Sprint("element", element)]))
		}
		whole := told[fmt.Sprint("request", i+1)]
		if sizes {
			w.Binding, _ = strconv.Atoi(whole[3])
		}
		w.Decision = w.Decisions[w.Binding-1]
		if sizes {
			if w.Allowed, w.Replayed, w.Shadowed = whole[0] == "t", whole[1] == "t", whole[2] == "t"; w.Allowed {
				w.RetryAfter = 0
			}
		}
		answers = append(answers, WholeAnswer{Whole: w})
	}
	return answers, err
}
