package policyfile

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// applyLock is the advisory lock of a session that applies a file: the bytes of "rlapply\n".
const applyLock = 0x726c_6170_706c_790a

// Apply changes a database to what a file says, and returns the changes. It changes everything, or nothing and returns an error. Of
// two that apply at the same time, the second compares with what the first has left.
//
// Apply locks the policies and overrides that it changes until it commits; acquires do not wait for these locks. Its error is
// [Problems] if the database refuses values of the file.
func Apply(ctx context.Context, db Database, file *File, options Options) (*Difference, error) {
	return try(ctx, db, file, options, func(tx pgx.Tx) error { return tx.Commit(ctx) })
}

// try makes the changes. They are taken back unless end commits.
func try(ctx context.Context, db Database, file *File, options Options, end func(pgx.Tx) error) (*Difference, error) {
	tx, err := db.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadWrite})
	if err != nil {
		return nil, failed("begin", err)
	}
	defer tx.Rollback(ctx)
	if err := alone(ctx, tx); err != nil {
		return nil, failed("wait for others who apply a file", err)
	}
	d, err := plan(ctx, tx, file, options)
	if err != nil {
		return nil, err
	}
	for _, change := range d.Changes {
		if err := change.apply(ctx, tx); err != nil {
			return nil, change.failed(err)
		}
	}
	if err := end(tx); err != nil {
		return nil, failed("commit", err)
	}
	return d, nil
}

// alone waits until no other session applies a file: for 30 s, unless the role has a lock_timeout.
func alone(ctx context.Context, tx pgx.Tx) error {
	const patience = "set_config('lock_timeout', '30s', true)"
	_, err := tx.Exec(ctx, "select "+patience+" where current_setting('lock_timeout') = '0'")
	if err != nil {
		return err
	}
	_, err = tx.Exec(ctx, "select pg_advisory_xact_lock($1)", int64(applyLock))
	return err
}

// failed adds the place in the file to an error, if the database has refused its value.
func (c *Change) failed(err error) error {
	if refusal, ok := errors.AsType[*pgconn.PgError](err); ok && c.Action != Drop && refusal.Code == "22023" {
		return Problems{{c.at, fmt.Sprintf("the database refuses this: %s: %s %s", refusal.Message, refusal.Detail, refusal.Hint)}}
	}
	return failed(c.String(), err)
}

func (p Policy) define(ctx context.Context, tx pgx.Tx) error {
	refills := !p.isSlots() && !p.isQuota()
	_, err := tx.Exec(ctx, `
		select ratelimit_define_policy($1::text, capacity => $2::bigint, refill => $3::bigint, every => $4::text::interval,
		                               stepped => $5::boolean, durable => $6::boolean, remember => $7::text::interval, shadow => $8::boolean,
		                               period => $9::text::interval, time_zone => $10::text, anchor => $11::text::timestamp,
		                               lease => $12::text::interval)`,
		p.Name, p.Capacity, onlyIf(refills, p.Refill), onlyIf(refills, p.Every.interval()), onlyIf(refills, p.Stepped),
		p.Durable, onlyIf(!p.isSlots(), p.Remember.interval()), p.Shadow,
		onlyIf(p.isQuota(), p.Period), onlyIf(p.isQuota(), p.TimeZone), onlyIf(p.isQuota(), p.Anchor), onlyIf(p.isSlots(), p.Lease.interval()))
	return err
}

// onlyIf returns the value of a field, or null for a kind of policy that does not have it.
func onlyIf(has bool, value any) any {
	if !has {
		return nil
	}
	return value
}

func (p Policy) drop(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, "select ratelimit_drop_policy($1::text)", p.Name)
	return err
}

func (o Override) remove(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.Exec(ctx, "select ratelimit_remove_override($1::text, $2::text)", o.Policy, o.Key)
	return err
}

// set passes all numbers, so that later changes of the policy do not change the override.
func (o Override) set(ctx context.Context, tx pgx.Tx) error {
	refills := !o.isOfSlots() && !o.isOfQuota()
	_, err := tx.Exec(ctx, `
		select ratelimit_override($1::text, $2::text, capacity => $3::bigint, refill => $4::bigint, every => $5::text::interval,
		                          expires_at => $6::text::timestamptz, time_zone => $7::text, anchor => $8::text::timestamp,
		                          lease => $9::text::interval)`,
		o.Policy, o.Key, o.Capacity, onlyIf(refills, o.Refill), onlyIf(refills, o.Every.interval()),
		onlyIf(!o.ExpiresAt.IsZero(), o.ExpiresAt.Format(time.RFC3339Nano)),
		onlyIf(o.isOfQuota(), o.TimeZone), onlyIf(o.isOfQuota(), o.Anchor), onlyIf(o.isOfSlots(), o.Lease.interval()))
	return err
}
