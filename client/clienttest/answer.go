package clienttest

import (
	"cmp"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/client/clienttest/model"
)

// A row is the result of a call.
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

// answer is the result of the function of that name: checks in its order, and then the model.
func (db *database) answer(sql string, args []any) ([]any, error) {
	for _, arg := range args {
		texts, _ := arg.([]string)
		if text, ok := arg.(string); ok {
			texts = []string{text}
		}
		for _, text := range texts {
			if !utf8.ValidString(text) {
				return nil, failure("22021", `invalid byte sequence for encoding "UTF8"`, "")
			}
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
		whole, err := db.acquire(now, []model.Charge{{BucketID: bucket(), Cost: number(2)}}, args[3])
		return columns(whole.Decision), err
	case "ratelimit_acquire_all":
		whole, err := db.acquire(now, charges(args), args[3])
		return joint(whole), err
	case "ratelimit_acquire_packed":
		return db.packed(now, charges(args), args[3], args[4]), nil
	case "ratelimit_peek":
		err = cmp.Or(checkBucket(bucket()), checkRange("cost", number(2), 0, math.MaxInt64), db.checkPolicy(text(0)))
		if err == nil {
			d, err = db.model.Peek(now, bucket(), number(2))
		}
		return columns(d), err
	case "ratelimit_refund":
		err = cmp.Or(checkBucket(bucket()), checkRange("amount", number(2), 0, math.MaxInt64), db.checkHasBuckets(text(0)))
		if err == nil {
			d, err = db.model.Refund(now, bucket(), number(2))
		}
		return columns(d), err
	case "ratelimit_pause":
		pauseFor := *micros(args[2])
		err = cmp.Or(checkBucket(bucket()), checkRange("pause_for", pauseFor, 1000, 365*day), db.checkPolicy(text(0)))
		if err == nil {
			d, err = db.model.Pause(now, bucket(), pauseFor)
		}
		if errors.Is(err, model.InvalidArgument) {
			err = failure("22023", "invalid policy", fmt.Sprintf("The numbers of key %s of policy %s do not refill, so nothing would follow the pause.",
				quoted(text(1)), quoted(text(0))))
		}
		return columns(d), err
	case "ratelimit_charge", "ratelimit_settle", "ratelimit_reserve", "ratelimit_acquire_up_to":
		return db.spend(function, now, bucket(), args)
	case "ratelimit_settle_all":
		return db.settleAll(now, charges([]any{args[0], args[1], args[3]}), text(2))
	case "ratelimit_hold", "ratelimit_renew", "ratelimit_release":
		return db.lend(function, now, bucket(), args)
	case "ratelimit_reset":
		if err = cmp.Or(checkBucket(bucket()), db.checkPolicy(text(0))); err == nil {
			err = db.model.Reset(now, bucket())
		}
		return []any{1}, err
	case "ratelimit_reset_all":
		if err = db.checkPolicy(text(0)); err == nil {
			err = cmp.Or(db.model.ResetAll(now, text(0)), pgx.ErrNoRows)
		}
		return nil, err
	case "ratelimit_define_policy":
		return []any{1}, db.define(text(0), args[1:])
	case "ratelimit_drop_policy":
		if err = db.checkPolicy(text(0)); err == nil {
			err = db.model.Drop(text(0))
		}
		return []any{1}, err
	case "ratelimit_override":
		return []any{1}, db.override(now, bucket(), args[2:])
	case "ratelimit_remove_override":
		had := false
		if err = cmp.Or(checkBucket(bucket()), db.checkPolicy(text(0))); err == nil {
			had, err = db.model.RemoveOverride(now, bucket())
		}
		return []any{had}, err
	case "ratelimit_overrides", "ratelimit_holders":
		if args[0] != nil {
			err = checkName("policy", text(0))
		}
		if args[1] != nil {
			err = cmp.Or(err, checkName("key", text(1)))
		}
		err = cmp.Or(err, checkRange("max_rows", number(2), 1, math.MaxInt64))
		if args[0] != nil {
			err = cmp.Or(err, db.checkPolicy(text(0)))
		}
		if function == "ratelimit_holders" {
			return []any{db.holders(now, args[0], args[1], number(2))}, err
		}
		return []any{db.overrides(now, args[0], args[1], number(2))}, err
	case "ratelimit_policies":
		return []any{db.policies()}, nil
	case "ratelimit_cleanup":
		return []any{int64(0), int64(0)}, checkRange("max_rows", number(0), 1, math.MaxInt64)
	case "ratelimit_cleanup_all":
		return nil, pgx.ErrNoRows
	}
	return nil, fmt.Errorf("clienttest: no answer to %s", sql)
}

// columns are the columns of a decision, in the order of the client's statements.
func columns(d model.Decision) []any {
	return []any{d.Allowed, d.Remaining, wait(d.RetryAfter), wait(d.ResetAfter), d.Capacity, d.Replayed, d.Shadowed}
}

// wait is null for never.
func wait(m model.Micros) any {
	if m == model.Never {
		return nil
	}
	return int64(m)
}

// define has the arguments after the name: a nil argument keeps the current value.
func (db *database) define(name string, args []any) error {
	def := model.Definition{Numbers: numbers(args[:3], args[8:]), Remember: micros(args[5])}
	var errs [3]error
	def.Stepped, errs[0] = boolean(args[3])
	def.Durable, errs[1] = boolean(args[4])
	def.Shadow, errs[2] = boolean(args[6])
	if text, ok := args[7].(string); ok {
		period, _ := client.ParsePeriod(text) // a text that is none is no period, which is refused
		def.Period = (*model.Period)(&period)
	}
	if text, ok := args[11].(string); ok {
		period, err := client.ParsePeriod(text)
		if err != nil && text != "0 days" {
			period.Days = -1 // which is refused
		}
		def.History = (*model.Period)(&period)
	}
	if err := cmp.Or(errs[0], errs[1], errs[2], checkName("policy", name)); err != nil {
		return err
	}
	return db.known(name, db.model.Define(name, def))
}

// override has the arguments after the bucket: a number that is nil is left as it is.
func (db *database) override(now time.Time, id model.BucketID, args []any) error {
	var expires time.Time
	if text, ok := args[3].(string); ok {
		var err error
		if expires, err = time.Parse(time.RFC3339Nano, text); err != nil {
			return failure("22007", fmt.Sprintf(`invalid input syntax for type timestamp with time zone: "%s"`, text), "")
		}
	}
	if err := checkBucket(id); err != nil {
		return err
	}
	_, err := db.model.Override(now, id, numbers(args[:3], args[4:]), expires)
	return db.known(id.Policy, err)
}

// known makes an error of the server of one of the model about a definition. It does not name the argument.
func (db *database) known(policy string, err error) error {
	switch {
	case errors.Is(err, model.UnknownPolicy):
		return db.checkPolicy(policy)
	case err != nil:
		return failure(err.Error(), "invalid argument", "An argument is out of range, or not for a policy of this kind.")
	}
	return nil
}

// numbers reads a capacity, a refill and an interval, and a zone, an anchor and a lease.
func numbers(refilling, rest []any) model.Numbers {
	n := model.Numbers{
		Capacity: given[int64](refilling[0]), Refill: given[int64](refilling[1]), Every: micros(refilling[2]),
		Zone: given[string](rest[0]), Lease: micros(rest[2]),
	}
	if text, ok := rest[1].(string); ok {
		anchor, _ := time.Parse("2006-01-02T15:04:05.999999", text)
		n.Anchor = &anchor
	}
	return n
}

// given is nil for an argument that is not.
func given[T any](arg any) *T {
	if value, ok := arg.(T); ok {
		return &value
	}
	return nil
}

const day = 24 * 60 * 60 * 1_000_000

// micros reads an interval as the client writes it.
func micros(arg any) *model.Micros {
	text, ok := arg.(string)
	if !ok {
		return nil
	}
	n, _ := strconv.ParseInt(strings.TrimSuffix(text, " microseconds"), 10, 64)
	return new(model.Micros(n))
}

func boolean(arg any) (*bool, error) {
	switch arg {
	case nil:
		return nil, nil
	case "yes", "no":
		return new(arg == "yes"), nil
	}
	return nil, failure("22P02", fmt.Sprintf(`invalid input syntax for type boolean: "%v"`, arg), "")
}

func (db *database) policies() string {
	rows := []map[string]any{}
	for name, p := range db.model.Policies() {
		row := map[string]any{"name": name, "capacity": p.Capacity, "durable": p.Durable, "remember": p.Remember, "shadow": p.Shadow}
		switch {
		case p.IsQuota():
			row["months"], row["days"], row["time_zone"], row["anchor"] = p.Period.Months, p.Period.Days, p.Zone, p.Anchor.UnixMicro()
			row["history_months"], row["history_days"] = p.History.Months, p.History.Days
		case p.IsSlots():
			row["remember"], row["lease"] = nil, p.Lease
		default:
			row["refill"], row["every"], row["stepped"] = p.Refill, p.Every, p.Stepped
		}
		rows = append(rows, row)
	}
	slices.SortFunc(rows, func(a, b map[string]any) int { return strings.Compare(a["name"].(string), b["name"].(string)) })
	text, _ := json.Marshal(rows)
	return string(text)
}

func (db *database) overrides(now time.Time, policy, key any, maxRows int64) string {
	all := db.model.Overrides()
	ids := slices.SortedFunc(maps.Keys(all), func(a, b model.BucketID) int {
		return cmp.Or(strings.Compare(a.Policy, b.Policy), strings.Compare(a.Key, b.Key))
	})
	rows := []map[string]any{}
	for _, id := range ids {
		if policy != nil && policy != id.Policy || key != nil && key != id.Key {
			continue
		}
		for _, o := range all[id].Parts(now) {
			n := o.Stays
			row := map[string]any{"policy": id.Policy, "key": id.Key}
			if !o.Expires.IsZero() {
				n, row["expires_at"] = o.Ends, o.Expires.UnixMicro()
			}
			row["capacity"], row["refill"], row["every"], row["time_zone"], row["lease"] = n.Capacity, n.Refill, n.Every, n.Zone, n.Lease
			if n.Anchor != nil {
				row["anchor"] = n.Anchor.UnixMicro()
			}
			rows = append(rows, row)
		}
	}
	rows = rows[:min(int64(len(rows)), max(0, maxRows))]
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

func checkBucket(id model.BucketID) error {
	return cmp.Or(checkName("policy", id.Policy), checkName("key", id.Key))
}

func checkName(argument, name string) error {
	switch n := len(name); {
	case n == 0:
		return invalid(argument, "empty")
	case n > 512:
		return invalid(argument, fmt.Sprintf("%d bytes long", n))
	}
	return nil
}

func checkRange[N int64 | model.Micros](argument string, n, least, most N) error {
	if n < least || n > most {
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
