package policyfile

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
)

// A state has the policies and overrides of a database.
type state struct {
	now       time.Time
	policies  map[string]Policy
	overrides map[bucket][]Override // their parts
}

type bucket struct{ policy, key string }

func readState(ctx context.Context, tx pgx.Tx) (*state, error) {
	s := &state{policies: make(map[string]Policy), overrides: make(map[bucket][]Override)}
	if err := tx.QueryRow(ctx, "select clock_timestamp()").Scan(&s.now); err != nil {
		return nil, failed("read the clock", err)
	}
	policies, err := ReadPolicies(ctx, tx)
	if err != nil {
		return nil, failed("list policies", err)
	}
	for _, p := range policies {
		s.policies[p.Name] = p
	}
	if err := s.readOverrides(ctx, tx); err != nil {
		return nil, failed("list overrides", err)
	}
	return s, nil
}

// numberColumns go into Numbers.columns. What a policy does not have is null in the database.
const numberColumns = `
	capacity, coalesce(refill, 0), coalesce((extract(epoch from every) * 1000000.0)::bigint, 0), coalesce(time_zone, ''),
	coalesce(to_char(anchor, 'YYYY-MM-DD"T"HH24:MI:SS.US'), ''), coalesce((extract(epoch from lease) * 1000000.0)::bigint, 0)`

func (n *Numbers) columns() []any {
	return []any{&n.Capacity, &n.Refill, &n.Every, &n.TimeZone, &n.Anchor, &n.Lease}
}

// ReadPolicies lists the policies of a database, by name.
func ReadPolicies(ctx context.Context, db inspect.Querier) (policies []Policy, err error) {
	rows, err := db.Query(ctx, `
		select policy, coalesce(stepped, false), durable, coalesce((extract(epoch from remember) * 1000000.0)::bigint, 0), shadow,
		       coalesce((extract(year from period) * 12.0 + extract(month from period))::integer, 0), coalesce(extract(day from period)::integer, 0),
		       coalesce((extract(year from history) * 12.0 + extract(month from history))::integer, 0), coalesce(extract(day from history)::integer, 0),
		       `+numberColumns+`
		  from ratelimit_policies()`)
	if err != nil {
		return nil, err
	}
	var p Policy
	var period, history client.Period
	columns := []any{&p.Name, &p.Stepped, &p.Durable, &p.Remember, &p.Shadow, &period.Months, &period.Days, &history.Months, &history.Days}
	_, err = pgx.ForEachRow(rows, append(columns, p.columns()...), func() error {
		p.Period, p.History, p.Anchor = period.String(), history.String(), parseAnchor(p.Anchor)
		policies = append(policies, p)
		return nil
	})
	return policies, err
}

func (s *state) readOverrides(ctx context.Context, tx pgx.Tx) error {
	parts, err := ReadOverrides(ctx, tx, "ratelimit_overrides(max_rows => $1::integer)", math.MaxInt32)
	for _, o := range parts {
		of := bucket{o.Policy, o.Key}
		s.overrides[of] = append(s.overrides[of], o)
	}
	return err
}

// ReadOverrides lists the parts of overrides that a function returns.
func ReadOverrides(ctx context.Context, db inspect.Querier, from string, args ...any) (parts []Override, err error) {
	rows, err := db.Query(ctx, `
		select policy, key, (extract(epoch from expires_at) * 1000000.0)::bigint, capacity, refill, (extract(epoch from every) * 1000000.0)::bigint,
		       time_zone, to_char(anchor, 'YYYY-MM-DD"T"HH24:MI:SS.US'), (extract(epoch from lease) * 1000000.0)::bigint
		  from `+from, args...)
	if err != nil {
		return nil, err
	}
	var o Override
	var expires, capacity, refill *int64
	var every, lease *Span
	var zone, anchor *string
	_, err = pgx.ForEachRow(rows, []any{&o.Policy, &o.Key, &expires, &capacity, &refill, &every, &zone, &anchor, &lease}, func() error {
		o.ExpiresAt, o.sets = time.Time{}, nil
		if expires != nil {
			o.ExpiresAt = time.UnixMicro(*expires).UTC()
		}
		if anchor != nil {
			anchor = new(parseAnchor(*anchor))
		}
		addValue(&o, "capacity", capacity)
		addValue(&o, "refill", refill)
		addValue(&o, "every", every)
		addValue(&o, "time_zone", zone)
		addValue(&o, "anchor", anchor)
		addValue(&o, "lease", lease)
		parts = append(parts, o)
		return nil
	})
	return parts, err
}

func addValue[T any](o *Override, field string, value *T) {
	if value != nil {
		o.sets = append(o.sets, fieldValue{field, *value})
	}
}

// Lost counts what is dropped with a policy.
type Lost struct {
	Buckets         int64 `json:"buckets"`
	Overrides       int64 `json:"overrides"`
	IdempotencyKeys int64 `json:"idempotency_keys"`
	Holders         int64 `json:"holders,omitempty"` // of slots
	Periods         int64 `json:"periods,omitempty"` // that are closed, of a quota
}

// readLost counts what is dropped with policies, in the tables: no function counts idempotency keys. It returns nil if the role may not
// read them.
func readLost(ctx context.Context, tx pgx.Tx, policies []string) (map[string]*Lost, error) {
	counts := make(map[string]*Lost, len(policies))
	err := pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		rows, err := tx.Query(ctx, `
			select p.name,
			       (select count(*) from (select policy_id from ratelimit.buckets
			                              union all select policy_id from ratelimit.ephemeral_buckets) as b where b.policy_id = p.id),
			       (select count(*) from ratelimit.overrides as o where o.policy_id = p.id),
			       (select count(*) from (select policy_id from ratelimit.idempotency_keys
			                              union all select policy_id from ratelimit.ephemeral_idempotency_keys) as i where i.policy_id = p.id),
			       (select count(*) from (table ratelimit.leases union all table ratelimit.ephemeral_leases) as l
			         where l.policy_id = p.id and l.ends_at > clock_timestamp()),
			       (select count(*) from ratelimit.usage as u where u.policy_id = p.id)
			  from ratelimit.policies as p
			 where p.name = any($1)`, policies)
		if err != nil {
			return err
		}
		var name string
		var lost Lost
		_, err = pgx.ForEachRow(rows, []any{&name, &lost.Buckets, &lost.Overrides, &lost.IdempotencyKeys, &lost.Holders, &lost.Periods}, func() error {
			counted := lost
			counts[name] = &counted
			return nil
		})
		return err
	})
	if refusal, ok := errors.AsType[*pgconn.PgError](err); ok && refusal.Code == "42501" {
		return nil, nil
	}
	return counts, err
}

// failed adds the failed step and a remedy to an error.
func failed(what string, err error) error { return fmt.Errorf("%s: %s%w", what, remedy(err), err) }

func remedy(err error) string {
	refusal, ok := errors.AsType[*pgconn.PgError](err)
	if !ok {
		return ""
	}
	switch refusal.Code {
	case "42883", "3F000", "42P01":
		return "the database lacks a function of pgratelimit, so install or upgrade it there, or set search_path: "
	case "42501":
		if function, ok := strings.CutPrefix(refusal.Message, "permission denied for function "); ok {
			return "the role may not do this, so connect as the owner of the functions, or run as the owner " + inspect.Grant(inspect.SomeRole, function) + " the error is: "
		}
		return "the role may not do this, so grant it, or connect as the owner of the functions: "
	case "55P03":
		return "another session holds this, so try again when it has ended: "
	case "0A000": // which a standby answers to the begin of a transaction that writes
		return "the database is read-only, so connect to the primary: "
	}
	return ""
}

// Export writes the policies and overrides of a database as a file. To [Apply] this file changes nothing. Shards have the same
// policies, and each shard has some of the overrides.
//
// Values that no file can have are an error.
func Export(ctx context.Context, dbs ...Database) ([]byte, error) {
	var whole *state
	for _, db := range dbs {
		s, err := stateOf(ctx, db)
		switch {
		case err != nil:
			return nil, err
		case whole == nil:
			whole = s
			continue
		case !reflect.DeepEqual(whole.policies, s.policies):
			return nil, errors.New("the policies of the shards are not the same: apply a policy file to all, or export one by one with SQL")
		}
		maps.Copy(whole.overrides, s.overrides)
	}
	text := whole.write()
	_, err := Parse("the export", text)
	return text, err
}

func stateOf(ctx context.Context, db Database) (*state, error) {
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly})
	if err != nil {
		return nil, failed("begin", err)
	}
	defer tx.Rollback(ctx)
	return readState(ctx, tx)
}

// defaults are those of a policy in a file.
var defaults = map[string]any{
	"stepped": false, "durable": true, "remember": Day, "shadow": false, "time_zone": defaultTimeZone, "anchor": defaultAnchor,
}

// write omits default values of policies. A key whose override has both parts has a list of them.
func (s *state) write() []byte {
	if len(s.policies) == 0 {
		return []byte("policies: {}\n")
	}
	var text strings.Builder
	text.WriteString("policies:\n")
	for _, p := range slices.SortedFunc(maps.Values(s.policies), func(a, b Policy) int { return cmp.Compare(a.Name, b.Name) }) {
		fmt.Fprintf(&text, "  %q: %s\n", p.Name, inline(p.fields(), defaults))
	}
	of := ""
	for _, o := range s.overridesInOrder() {
		parts := s.overrides[bucket{o.Policy, o.Key}]
		if len(parts) == 2 && !o.ExpiresAt.IsZero() {
			continue // written with the other
		}
		if of == "" {
			text.WriteString("\noverrides:\n")
		}
		if of != o.Policy {
			fmt.Fprintf(&text, "  %q:\n", o.Policy)
		}
		of = o.Policy
		entries := inline(parts[0].fields(), nil)
		if len(parts) == 2 {
			entries = "[" + entries + ", " + inline(parts[1].fields(), nil) + "]"
		}
		fmt.Fprintf(&text, "    %q: %s\n", o.Key, entries)
	}
	return []byte(text.String())
}

// inline writes the fields that differ from the defaults in one line.
func inline(fields []fieldValue, defaults map[string]any) string {
	var written []string
	for _, f := range fields {
		if usual, isThere := defaults[f.field]; !isThere || usual != f.value {
			written = append(written, fmt.Sprintf("%s: %v", f.field, f.value))
		}
	}
	return "{" + strings.Join(written, ", ") + "}"
}

func (s *state) overridesInOrder() []Override {
	all := slices.Concat(slices.Collect(maps.Values(s.overrides))...)
	slices.SortStableFunc(all, func(a, b Override) int { return cmp.Or(cmp.Compare(a.Policy, b.Policy), cmp.Compare(a.Key, b.Key)) })
	return all
}
