package policyfile

import (
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

	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
)

type state struct {
	now       time.Time
	policies  map[string]Policy
	overrides map[Bucket][]Override // their parts
}

func readState(ctx context.Context, tx pgx.Tx) (*state, error) {
	s := &state{policies: make(map[string]Policy), overrides: make(map[Bucket][]Override)}
	var now int64 // whatever the DateStyle
	if err := tx.QueryRow(ctx, "select (extract(epoch from clock_timestamp()) * 1000000)::bigint").Scan(&now); err != nil {
		return nil, failed("read the clock", err)
	}
	s.now = time.UnixMicro(now)
	policies, err := ReadPolicies(ctx, tx)
	if err != nil {
		return nil, failed("list policies", err)
	}
	for _, p := range policies {
		s.policies[p.Name] = p
	}
	parts, err := ReadOverrides(ctx, tx, "ratelimit_overrides(max_rows => $1::integer)", math.MaxInt32)
	if err != nil {
		return nil, failed("list overrides", err)
	}
	for _, o := range parts {
		s.overrides[o.Bucket] = append(s.overrides[o.Bucket], o)
	}
	return s, nil
}

// ReadPolicies lists the policies of a database, by name.
func ReadPolicies(ctx context.Context, db inspect.Querier) (policies []Policy, err error) {
	rows, err := readValues(ctx, db, "policy", "''", "ratelimit_policies()")
	for _, row := range rows {
		policies = append(policies, Policy{Name: row.Policy, Values: row.Values})
	}
	return policies, err
}

// ReadOverrides lists the parts of overrides that a function returns.
func ReadOverrides(ctx context.Context, db inspect.Querier, from string, args ...any) ([]Override, error) {
	return readValues(ctx, db, "override", "key", from, args...)
}

// readValues reads the columns of a function that are fields of a definition of the schema. What is null has no value.
func readValues(ctx context.Context, db inspect.Querier, definition, key, from string, args ...any) ([]Override, error) {
	read := schema.find("$defs", definition, "properties").inOrder()
	columns := make([]string, len(read))
	for i, field := range read {
		columns[i] = fmt.Sprintf(formOf(field).column, field.name)
	}
	rows, err := db.Query(ctx, "select policy, "+key+", array["+strings.Join(columns, ", ")+"] from "+from, args...)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, func(row pgx.CollectableRow) (Override, error) {
		o := Override{Values: make(Values)}
		var texts []*string
		err := row.Scan(&o.Policy, &o.Key, &texts)
		for i, text := range texts {
			if text != nil {
				o.add(read[i], *text)
			}
		}
		return o, err
	})
}

// Lost counts what is dropped with a policy.
type Lost struct {
	Buckets         int64 `json:"buckets"`
	Overrides       int64 `json:"overrides"`
	IdempotencyKeys int64 `json:"idempotency_keys"`
	Holders         int64 `json:"holders,omitempty"` // of slots
	Periods         int64 `json:"periods,omitempty"` // that are closed, of a quota
}

// readLost counts what is dropped with policies, in the tables, since no function counts all. It returns nil if the role may not read them.
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
		type ofPolicy struct {
			Name string
			Lost
		}
		all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[ofPolicy])
		for i := range all {
			counts[all[i].Name] = &all[i].Lost
		}
		return err
	})
	if refusal, ok := errors.AsType[*pgconn.PgError](err); ok && refusal.Code == "42501" {
		return nil, nil
	}
	return counts, err
}

// failed adds the failed step and a remedy to an error.
func failed(step string, err error) error { return fmt.Errorf("%s: %w", step, inspect.Described(err)) }

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

// write omits default values of policies. A key whose override has both parts has a list of them.
func (s *state) write() []byte {
	if len(s.policies) == 0 {
		return []byte("policies: {}\n")
	}
	var text strings.Builder
	text.WriteString("policies:\n")
	for _, name := range slices.Sorted(maps.Keys(s.policies)) {
		values, usual := s.policies[name].Values, defaults[s.policies[name].kind()]
		maps.DeleteFunc(values, func(field string, value any) bool { return value == usual[field] })
		fmt.Fprintf(&text, "  %q: {%s}\n", name, values.list("%s: %v"))
	}
	before := ""
	for _, of := range s.keys() {
		if before == "" {
			text.WriteString("\noverrides:\n")
		}
		if before != of.Policy {
			fmt.Fprintf(&text, "  %q:\n", of.Policy)
		}
		before = of.Policy
		var parts []string
		for _, part := range s.overrides[of] {
			parts = append(parts, "{"+part.list("%s: %v")+"}")
		}
		entry := strings.Join(parts, ", ")
		if len(parts) > 1 {
			entry = "[" + entry + "]"
		}
		fmt.Fprintf(&text, "    %q: %s\n", of.Key, entry)
	}
	return []byte(text.String())
}

func (s *state) keys() []Bucket { return slices.SortedFunc(maps.Keys(s.overrides), Bucket.compare) }
