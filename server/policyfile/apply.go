package policyfile

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// applyLock is the advisory lock of a transaction that applies a file: the bytes of "rlapply\n".
const applyLock = 0x726c_6170_706c_790a

// Apply changes a database to what a file says, and returns the changes. It changes everything, or nothing and returns an error. Of
// two that apply at the same time, the second compares with what the first has left.
//
// Apply locks the policies and overrides that it changes until it commits; acquires do not wait for these locks. Its error is
// [Problems] if the database refuses values of the file.
func Apply(ctx context.Context, db Database, file *File, options Options) (*Difference, error) {
	return inTransaction(ctx, db, file, options, func(tx pgx.Tx) error { return tx.Commit(ctx) })
}

// inTransaction makes the changes of a file. They are taken back unless end commits. It reads committed rows: a snapshot for the whole
// transaction would be older than the lock, and miss what others have committed.
func inTransaction(ctx context.Context, db Database, file *File, options Options, end func(pgx.Tx) error) (*Difference, error) {
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		return nil, failed("begin", err)
	}
	defer tx.Rollback(ctx)
	if err := waitForOthers(ctx, tx); err != nil {
		return nil, failed("wait for others who apply a file", err)
	}
	d, err := plan(ctx, tx, file, options)
	if err != nil {
		return nil, err
	}
	for _, change := range d.Changes {
		if err := change.apply(ctx, tx); err != nil {
			return nil, err
		}
	}
	if err := end(tx); err != nil {
		return nil, failed("commit", err)
	}
	return d, nil
}

// waitForOthers waits until no other transaction applies a file. Unless lock_timeout is set, no lock of the transaction is waited for
// longer than 30 s.
func waitForOthers(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, "select set_config('lock_timeout', '30s', true) where current_setting('lock_timeout') = '0'")
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, "select pg_advisory_xact_lock($1)", int64(applyLock))
	return err
}

// failed makes a Problem of an error by which the database refuses a value: at the field, if the node has it, else at the position.
func (c *Change) failed(err error, at Position, node *node) error {
	if refusal, ok := errors.AsType[*pgconn.PgError](err); ok && refusal.Code == "22023" {
		if field := node.find(strings.TrimPrefix(refusal.Message, "invalid ")); field != nil {
			at = field.valueAt
		}
		return Problems{{at, fmt.Sprintf("the database refuses this: %s: %s %s", refusal.Message, refusal.Detail, refusal.Hint)}}
	}
	return failed(c.String(), err)
}

// apply makes the change. An override is removed, and set again by all its parts: a call would leave the numbers that it does not set.
func (c *Change) apply(ctx context.Context, tx pgx.Tx) error {
	call := func(function string, args []any, sets []fieldValue) error {
		var passed []string
		for i := range args {
			passed = append(passed, fmt.Sprintf("$%d::text", i+1))
		}
		for _, v := range sets {
			args = append(args, v.sql())
			passed = append(passed, fmt.Sprintf("%s => $%d::text::%s", v.field, len(args), types[v.field]))
		}
		_, err := tx.Exec(ctx, "select "+function+"("+strings.Join(passed, ", ")+")", args...)
		return err
	}
	ofPolicy, ofKey := []any{c.Policy}, []any{c.Policy, c.Key}
	switch {
	case c.Key == "" && c.Action != Drop:
		if err := call("ratelimit_define_policy", ofPolicy, c.sets); err != nil {
			return c.failed(err, c.at, c.node)
		}
		return nil
	case c.Key == "":
		if err := call("ratelimit_drop_policy", ofPolicy, nil); err != nil {
			return failed(c.String(), err)
		}
		return nil
	case c.isMade:
		return nil
	}
	if c.existed || c.Action == Drop {
		if err := call("ratelimit_remove_override", ofKey, nil); err != nil {
			return failed(c.String(), err)
		}
	}
	for _, part := range c.parts {
		if err := call("ratelimit_override", ofKey, part.fields()); err != nil {
			return c.failed(err, part.At, part.node)
		}
	}
	return nil
}

// IsAs reports whether a policy has the same fields.
func (p Policy) IsAs(other Policy) bool { return slices.Equal(p.fields(), other.fields()) }

// Define creates or changes the policy.
func (p Policy) Define(ctx context.Context, tx pgx.Tx) error {
	change := &Change{Action: Create, Policy: p.Name, at: p.At, node: p.node, sets: p.fields()}
	return change.apply(ctx, tx)
}

// Statement is what Define does, for a person. It leaves durable and remember to the database.
func (p Policy) Statement() string {
	text := "select ratelimit_define_policy('" + strings.ReplaceAll(p.Name, "'", "''") + "'"
	for _, v := range p.fields() {
		switch value := v.value.(type) {
		case string, Span:
			if v.field != "remember" {
				text += fmt.Sprintf(", %s => '%v'", v.field, value)
			}
		default:
			if v.field != "durable" {
				text += fmt.Sprintf(", %s => %v", v.field, value)
			}
		}
	}
	return text + ");"
}

// types are those of the arguments of ratelimit_define_policy and ratelimit_override.
var types = map[string]string{
	"capacity": "bigint", "refill": "bigint", "every": "interval", "stepped": "boolean", "durable": "boolean", "remember": "interval",
	"shadow": "boolean", "period": "interval", "time_zone": "text", "anchor": "timestamp", "lease": "interval", "history": "interval", "expires_at": "timestamptz",
}

// sql writes a value for PostgreSQL, a span exactly.
func (v fieldValue) sql() string {
	if span, isSpan := v.value.(Span); isSpan {
		return fmt.Sprintf("%d microseconds", int64(span))
	}
	return fmt.Sprint(v.value)
}
