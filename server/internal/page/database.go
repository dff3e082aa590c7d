package page

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/server/internal/inspect"
)

const (
	// maxPolicies, maxBuckets and maxHolders, of a bucket, are the longest lists on the page.
	maxPolicies = 200
	maxBuckets  = 20
	maxHolders  = 100

	// readTime bounds one reading of the database.
	readTime = 4 * time.Second

	// rest is a multiple of the time that a statement took: the pause before it is repeated. The page so uses at most a twentieth
	// of one core of the database.
	rest = 20
)

// A reading has the rows that a function of the database returned last.
type reading[T any] struct {
	function string
	ask      func(context.Context, pgx.Tx) ([]T, error)
	limit    time.Duration // for the statement
	every    time.Duration // at most

	section[T]
	nextAt time.Time
}

// A section has the rows of a reading, for the page.
type section[T any] struct {
	rows   []T
	at     time.Time // when they were read; zero without any
	notice string    // why there is nothing newer; empty if there is
}

// read queries the database, unless it is too early.
func (r *reading[T]) read(ctx context.Context, d *database) {
	begin := d.now()
	if begin.Before(r.nextAt) {
		return
	}
	var rows []T
	err := pgx.BeginTxFunc(ctx, d.db, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, fmt.Sprintf("set local statement_timeout = %d", r.limit.Milliseconds()))
		if err == nil {
			rows, err = r.ask(ctx, tx)
		}
		return err
	})
	end := d.now()
	if err == nil {
		r.section = section[T]{rows: rows, at: end}
	} else {
		if r.notice == "" {
			d.log.Warn("the status page cannot show everything", "function", r.function, "error", err)
		}
		r.notice = d.noticeOf(ctx, err, r.limit, r.function)
	}
	r.nextAt = end.Add(max(r.every, rest*end.Sub(begin)))
}

// A database has the readings of one database.
type database struct {
	db  *pgxpool.Pool
	log *slog.Logger
	now func() time.Time

	patience time.Duration // with one look at the database
	reading  sync.Mutex    // one at a time
	policies reading[client.Policy]
	buckets  reading[inspect.Bucket]
	findings reading[inspect.Finding]
	role     string // quoted, once somebody asked

	mu   sync.Mutex
	seen snapshot // what the last reading left
}

type snapshot struct {
	policies section[client.Policy]
	buckets  section[inspect.Bucket]
	findings section[inspect.Finding]
}

func newDatabase(db *pgxpool.Pool, log *slog.Logger, now func() time.Time) *database {
	d := &database{db: db, log: log, now: now, patience: readTime}
	d.policies = reading[client.Policy]{function: "ratelimit_policies", limit: time.Second / 2, every: 5 * time.Second}
	d.policies.ask = func(ctx context.Context, tx pgx.Tx) ([]client.Policy, error) {
		policies, err := client.New(db).WithTx(tx).Policies(ctx)
		return slices.Clone(policies[:min(len(policies), maxPolicies+1)]), err // one more tells that there are more
	}
	d.buckets = reading[inspect.Bucket]{function: "ratelimit_status", limit: 2 * time.Second, every: 5 * time.Second}
	d.buckets.ask = func(ctx context.Context, tx pgx.Tx) ([]inspect.Bucket, error) {
		buckets, err := inspect.Buckets(ctx, tx, nil, nil, maxBuckets)
		return slices.DeleteFunc(buckets, func(b inspect.Bucket) bool { return b.Share() >= 1 }), err
	}
	d.findings = reading[inspect.Finding]{function: "ratelimit_doctor", limit: time.Second, every: time.Minute}
	d.findings.ask = func(ctx context.Context, tx pgx.Tx) ([]inspect.Finding, error) { return inspect.Findings(ctx, tx) }
	return d
}

// look returns the last readings. It first queries the database if it is time to. While another request queries, look waits only
// for the first reading.
func (d *database) look(isAway bool) snapshot {
	d.mu.Lock()
	seen := d.seen
	d.mu.Unlock()
	if isAway {
		return seen
	}
	if !d.reading.TryLock() {
		if !seen.buckets.at.IsZero() || seen.buckets.notice != "" {
			return seen
		}
		d.reading.Lock()
	}
	defer d.reading.Unlock()
	// The context of the request would cancel the query, and so cost a connection, whenever a browser closes the page.
	ctx, cancel := context.WithTimeout(context.Background(), d.patience)
	defer cancel()
	d.policies.read(ctx, d)
	d.buckets.read(ctx, d)
	d.findings.read(ctx, d)
	seen = snapshot{d.policies.section, d.buckets.section, d.findings.section}
	d.mu.Lock()
	d.seen = seen
	d.mu.Unlock()
	return seen
}

// find returns the buckets of a key, under one policy or under all, and who holds slots of it. It queries at once; only one search
// runs at a time.
func (d *database) find(policy, key string) (section[inspect.Bucket], section[client.Holder]) {
	d.reading.Lock()
	defer d.reading.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), d.patience)
	defer cancel()
	of := &policy
	if policy == "" {
		of = nil
	}
	buckets := reading[inspect.Bucket]{function: "ratelimit_status", limit: d.buckets.limit}
	buckets.ask = func(ctx context.Context, tx pgx.Tx) ([]inspect.Bucket, error) {
		return inspect.Buckets(ctx, tx, of, &key, maxBuckets)
	}
	buckets.read(ctx, d)
	d.policies.read(ctx, d)
	var holders section[client.Holder]
	for _, b := range buckets.rows {
		if !slices.ContainsFunc(d.policies.rows, func(p client.Policy) bool { return p.Name == b.Policy && p.Lease > 0 }) {
			continue
		}
		held := reading[client.Holder]{function: "ratelimit_holders", limit: d.buckets.limit}
		held.ask = func(ctx context.Context, tx pgx.Tx) ([]client.Holder, error) {
			return client.New(d.db).WithTx(tx).Holders(ctx, client.OfPolicy(b.Policy), client.OfKey(b.Key), client.MaxRows(maxHolders))
		}
		held.read(ctx, d)
		held.rows = append(holders.rows, held.rows...)
		holders = held.section
	}
	return buckets.section, holders
}

// noticeOf returns what a reader of the page can do about an error.
func (d *database) noticeOf(ctx context.Context, err error, limit time.Duration, function string) string {
	pgErr, isPg := errors.AsType[*pgconn.PgError](err)
	if !isPg {
		return "The database did not answer. This is tried again."
	}
	switch pgErr.Code {
	case "42501": // insufficient_privilege
		return "The server's role may not see this. The owner of the package can run: " + inspect.Grant(d.roleName(ctx), function)
	case "42883": // undefined_function
		return "The database has no " + function + ": the package is older than this program. Run: pgratelimit install"
	case "57014": // query_canceled
		return "The database took longer than " + interval(limit) + ", and was not waited for. On a command line, pgratelimit status waits."
	case "55P03": // lock_not_available
		return "Somebody has locked the tables, such as a migration. This is tried again."
	case "RL001": // of a search
		return "There is no such policy."
	}
	return fmt.Sprintf("The database failed: %s (%s).", pgErr.Message, pgErr.Code)
}

func (d *database) roleName(ctx context.Context) string {
	if d.role == "" {
		if err := d.db.QueryRow(ctx, "select pg_catalog.quote_ident(current_user)").Scan(&d.role); err != nil {
			return "…"
		}
	}
	return d.role
}
