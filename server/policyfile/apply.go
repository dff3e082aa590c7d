package policyfile

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// takeTurns waits until no other transaction applies a file, by a lock whose number is the bytes of "rlapply\n". Unless lock_timeout is
// set, no lock of the transaction is waited for longer than 30 s.
const takeTurns = `
	select set_config('lock_timeout', '30s', true) where current_setting('lock_timeout') = '0';
	select pg_advisory_xact_lock(x'726c6170706c790a'::bigint)`

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
	if _, err = tx.Exec(ctx, takeTurns); err != nil {
		return nil, failed("wait for others who apply a file", err)
	}
	d, err := plan(ctx, tx, file, options)
	if err != nil {
		return nil, err
	}
	for _, c := range d.calls {
		if err := c.run(ctx, tx); err != nil {
			return nil, err
		}
	}
	if err := end(tx); err != nil {
		return nil, failed("commit", err)
	}
	return d, nil
}

// A call of a public SQL function makes a change, or a part of it.
type call struct {
	change   *Change
	function string
	values   Values
	at       Position // of the values
	node     *node    // which has them, or nil
}

// run makes the call. If the database refuses a value, the error is a Problem: at the field, if the node has it.
func (c call) run(ctx context.Context, tx pgx.Tx) error {
	args, passed := []any{c.change.Policy}, "$1::text"
	if c.change.Key != "" {
		args, passed = append(args, c.change.Key), "$1::text, $2::text"
	}
	for _, field := range fields {
		value := c.values[field.name]
		if span, isSpan := value.(Span); isSpan {
			value = fmt.Sprintf("%d microseconds", int64(span)) // PostgreSQL does not read 1ms1us
		}
		if value != nil {
			args = append(args, fmt.Sprint(value))
			passed += fmt.Sprintf(", %s => $%d::text::%s", field.name, len(args), formOf(field).sqlType)
		}
	}
	_, err := tx.Exec(ctx, "select "+c.function+"("+passed+")", args...)
	if refusal, ok := errors.AsType[*pgconn.PgError](err); ok && refusal.Code == "22023" && c.values != nil {
		if field := c.node.find(strings.TrimPrefix(refusal.Message, "invalid ")); field != nil {
			c.at = field.valueAt
		}
		return Problems{{c.at, fmt.Sprintf("the database refuses this: %s: %s %s", refusal.Message, refusal.Detail, refusal.Hint)}}
	}
	if err != nil {
		return failed(c.change.String(), err)
	}
	return nil
}

func (p Policy) define(change *Change) call {
	return call{change, "ratelimit_define_policy", p.Values, p.At, p.node}
}

// Define creates or changes the policy.
func (p Policy) Define(ctx context.Context, tx pgx.Tx) error {
	return p.define(&Change{Action: Create, Bucket: Bucket{Policy: p.Name}}).run(ctx, tx)
}

// Statement is what Define does, for a person.
func (p Policy) Statement() string {
	literals := maps.Clone(p.Values)
	for field, value := range literals {
		switch value.(type) {
		case string, Span:
			literals[field] = fmt.Sprintf("'%v'", value)
		}
	}
	return "select ratelimit_define_policy('" + strings.ReplaceAll(p.Name, "'", "''") + "', " + literals.list("%s => %v") + ");"
}
