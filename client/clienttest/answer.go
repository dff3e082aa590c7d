package clienttest

import (
	"cmp"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math/big"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/tests/model"
)

// A row is what a call returns.
type row struct {
	values []any
	err    error
}

func (r row) Scan(dest ...any) error {
	if r.err != nil {
		return r.err
	}
	for i, value := range r.values {
		if nullable, ok := dest[i].(sql.Scanner); ok {
			if err := nullable.Scan(value); err != nil {
				return err
			}
			continue
		}
		reflect.ValueOf(dest[i]).Elem().Set(reflect.ValueOf(value))
	}
	return nil
}

var functionName = regexp.MustCompile(`ratelimit_\w+`)

// answer is what the function of that name returns: checks in its order, and then the model.
func (db *database) answer(sql string, args []any) ([]any, error) {
	for _, arg := range args {
		if text, ok := arg.(string); ok && !utf8.ValidString(text) {
			return nil, failure("22021", `invalid byte sequence for encoding "UTF8"`, "")
		}
	}
	function, now := functionName.FindString(sql), db.instant()
	text := func(i int) string { s, _ := args[i].(string); return s }
	number := func(i int) int64 { n, _ := args[i].(int64); return n }
	bucket := func() model.BucketID { return model.BucketID{Policy: text(0), Key: text(1)} }
	var d model.Decision
	var err error
	switch function {
	case "ratelimit_acquire":
		err = cmp.Or(checkName("policy", args[0]), checkName("key", args[1]), checkTokens("cost", number(2)))
		if args[3] != nil {
			err = cmp.Or(err, checkName("idempotency_key", args[3]))
		}
		if err = cmp.Or(err, db.checkPolicy(text(0))); err == nil {
			d, err = db.model.Acquire(now, bucket(), number(2), text(3))
		}
		if errors.Is(err, model.IdempotencyMismatch) {
			err = failure(string(model.IdempotencyMismatch), "idempotency key used before with another cost",
				fmt.Sprintf("%s comes back with cost %d.", quoted(text(3)), number(2)))
		}
		return columns(d), err
	case "ratelimit_peek":
		err = cmp.Or(checkName("policy", args[0]), checkName("key", args[1]), checkTokens("cost", number(2)), db.checkPolicy(text(0)))
		if err == nil {
			d, err = db.model.Peek(now, bucket(), number(2))
		}
		return columns(d), err
	case "ratelimit_refund":
		err = cmp.Or(checkName("policy", args[0]), checkName("key", args[1]), checkTokens("amount", number(2)), db.checkPolicy(text(0)))
		if err == nil {
			d, err = db.model.Refund(now, bucket(), number(2))
		}
		return columns(d), err
	case "ratelimit_reset":
		if err = cmp.Or(checkName("policy", args[0]), checkName("key", args[1]), db.checkPolicy(text(0))); err == nil {
			err = db.model.Reset(bucket())
		}
		return []any{1}, err
	case "ratelimit_define_policy":
		return []any{1}, db.define(text(0), args[1:])
	case "ratelimit_drop_policy":
		if err = db.checkPolicy(text(0)); err == nil {
			err = db.model.Drop(text(0))
		}
		return []any{1}, err
	case "ratelimit_policies":
		return []any{db.policies()}, nil
	case "ratelimit_cleanup":
		return []any{int64(0), int64(0)}, checkPositive("max_rows", number(0))
	case "ratelimit_cleanup_all":
		return nil, pgx.ErrNoRows
	}
	return nil, fmt.Errorf("clienttest: no answer to %s", sql)
}

// columns are those of a decision, in the order of the client's statements.
func columns(d model.Decision) []any {
	var retryAfter any
	if d.RetryAfter != model.Never {
		retryAfter = int64(d.RetryAfter)
	}
	return []any{d.Allowed, d.Remaining, retryAfter, int64(d.ResetAfter), d.Capacity, d.Replayed}
}

// define has the arguments after the name: what is nil keeps what is there.
func (db *database) define(name string, args []any) error {
	p, exists := db.model.Policy(name)
	def := model.Definition{Capacity: p.Capacity, Refill: p.Refill, Every: p.Every}
	if n, ok := args[0].(int64); ok {
		def.Capacity = n
	}
	if n, ok := args[1].(int64); ok {
		def.Refill = n
	}
	if every := micros(args[2]); every != nil {
		def.Every = *every
	}
	var err, otherErr error
	def.Stepped, err = boolean(args[3])
	def.Durable, otherErr = boolean(args[4])
	def.Remember = micros(args[5])

	err = cmp.Or(err, otherErr, checkName("policy", name),
		checkCapacity("capacity", def.Capacity), checkCapacity("refill", def.Refill), checkPositive("every", int64(def.Every)))
	if err == nil && product(def.Capacity, int64(def.Every)).Cmp(product(def.Refill, 3_652_500*day)) > 0 {
		err = invalid("refill", fmt.Sprintf("%d every %v", def.Refill, def.Every))
	}
	if def.Remember != nil {
		err = cmp.Or(err, checkPositive("remember", int64(*def.Remember)))
	}
	if err == nil && exists && def.Durable != nil && *def.Durable != p.Durable {
		err = failure("22023", "invalid durable", fmt.Sprintf("Policy %s was created with durable => %v.", quoted(name), p.Durable))
	}
	if err != nil {
		return err
	}
	return db.model.Define(name, def)
}

const day = 24 * 60 * 60 * 1_000_000

func product(a, b int64) *big.Int { return new(big.Int).Mul(big.NewInt(a), big.NewInt(b)) }

// micros reads an interval as the client writes it.
func micros(arg any) *model.Micros {
	text, ok := arg.(string)
	if !ok {
		return nil
	}
	n, _ := strconv.ParseInt(strings.TrimSuffix(text, " microseconds"), 10, 64)
	m := model.Micros(n)
	return &m
}

func boolean(arg any) (*bool, error) {
	yes := arg == "yes"
	switch arg {
	case nil:
		return nil, nil
	case "yes", "no":
		return &yes, nil
	}
	return nil, failure("22P02", fmt.Sprintf(`invalid input syntax for type boolean: "%v"`, arg), "")
}

func (db *database) policies() string {
	rows := []map[string]any{}
	for name, p := range db.model.Policies() {
		rows = append(rows, map[string]any{
			"name": name, "capacity": p.Capacity, "refill": p.Refill, "every": p.Every,
			"stepped": p.Stepped, "durable": p.Durable, "remember": p.Remember,
		})
	}
	slices.SortFunc(rows, func(a, b map[string]any) int { return strings.Compare(a["name"].(string), b["name"].(string)) })
	text, _ := json.Marshal(rows)
	return string(text)
}

// checkPolicy refuses the name of a policy that cannot be, or is not.
func (db *database) checkPolicy(name string) error {
	if err := checkName("policy", name); err != nil {
		return err
	}
	if _, ok := db.model.Policy(name); !ok {
		return failure(string(model.UnknownPolicy), "unknown policy", fmt.Sprintf("No policy is named %s.", quoted(name)))
	}
	return nil
}

func checkName(argument string, name any) error {
	switch n := len(name.(string)); {
	case n == 0:
		return invalid(argument, "empty")
	case n > 512:
		return invalid(argument, fmt.Sprintf("%d bytes long", n))
	}
	return nil
}

func checkTokens(argument string, n int64) error {
	if n < 0 {
		return invalid(argument, n)
	}
	return nil
}

func checkCapacity(argument string, n int64) error {
	if n < 1 || n > 9_000_000_000_000 {
		return invalid(argument, n)
	}
	return nil
}

func checkPositive(argument string, n int64) error {
	if n < 1 {
		return invalid(argument, n)
	}
	return nil
}

func invalid(argument string, fact any) error {
	return failure("22023", "invalid "+argument, fmt.Sprintf("%s is %v.", argument, fact))
}

// failure is an error of the server.
func failure(code, message, detail string) error {
	return &pgconn.PgError{Severity: "ERROR", SeverityUnlocalized: "ERROR", Code: code, Message: message, Detail: detail}
}

func quoted(text string) string { return "'" + strings.ReplaceAll(text, "'", "''") + "'" }
