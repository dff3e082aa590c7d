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

	// readTime bounds a look at the database, and statementTime each of its statements.
	readTime      = 4 * time.Second
	statementTime = 2 * time.Second

	// lookEvery is the shortest time between two looks. A look that took long is followed by a pause of rest times as long: the page
	// so uses at most a twentieth of one core of the database.
	lookEvery = 5 * time.Second
	rest      = 20
)

// A database is read for the page, by one request at a time.
type database struct {
	db   *pgxpool.Pool
	name string // of a shard
	log  *slog.Logger
	now  func() time.Time

	patience, limit time.Duration

	mu     sync.Mutex
	seen   snapshot
	nextAt time.Time
}

// A snapshot is what the last look has left.
type snapshot struct {
	policies section[client.Policy]
	buckets  section[inspect.Bucket]
	findings section[inspect.Finding]
}

// A section has the rows that a function of the database returned.
type section[T any] struct {
	rows   []T
	at     time.Time // when they were read; zero without any
	notice string    // why there is nothing newer; empty if there is
}

// look queries the database if it is time to, and returns what was seen last.
func (d *database) look(isAway bool) snapshot {
	d.mu.Lock()
	defer d.mu.Unlock()
	begin := d.now()
	if isAway || begin.Before(d.nextAt) {
		return d.seen
	}
	// The context of the request would cancel the query, and so cost a connection, whenever a browser closes the page.
	ctx, cancel := context.WithTimeout(context.Background(), d.patience)
	defer cancel()
	read(ctx, d, &d.seen.policies, "ratelimit_policies", func(tx pgx.Tx) ([]client.Policy, error) {
		return client.New(d.db).WithTx(tx).Policies(ctx)
	})
	read(ctx, d, &d.seen.buckets, "ratelimit_status", func(tx pgx.Tx) ([]inspect.Bucket, error) {
		buckets, err := inspect.Buckets(ctx, tx, nil, nil, maxBuckets)
		return slices.DeleteFunc(buckets, func(b inspect.Bucket) bool { return b.Share() > 0.5 }), err
	})
	read(ctx, d, &d.seen.findings, "ratelimit_doctor", func(tx pgx.Tx) ([]inspect.Finding, error) {
		return inspect.Findings(ctx, tx, d.name)
	})
	end := d.now()
	d.nextAt = end.Add(max(lookEvery, rest*end.Sub(begin)))
	return d.seen
}

// find returns the buckets of a key, under one policy or under all, and who holds slots of it.
func (d *database) find(policy, key string) (buckets section[inspect.Bucket], holders section[client.Holder]) {
	d.mu.Lock()
	defer d.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), d.patience)
	defer cancel()
	of := &policy
	if policy == "" {
		of = nil
	}
	read(ctx, d, &buckets, "ratelimit_status", func(tx pgx.Tx) ([]inspect.Bucket, error) {
		return inspect.Buckets(ctx, tx, of, &key, maxBuckets)
	})
	for _, p := range d.seen.policies.rows {
		if p.Lease == 0 || !slices.ContainsFunc(buckets.rows, func(b inspect.Bucket) bool { return b.Policy == p.Name }) {
			continue
		}
		before := holders.rows
		read(ctx, d, &holders, "ratelimit_holders", func(tx pgx.Tx) ([]client.Holder, error) {
			more, err := client.New(d.db).WithTx(tx).Holders(ctx, client.OfPolicy(p.Name), client.OfKey(key), client.MaxRows(maxHolders))
			return append(before, more...), err
		})
	}
	return buckets, holders
}

// read replaces the rows of a section, or says why there are no newer ones.
func read[T any](ctx context.Context, d *database, into *section[T], function string, ask func(pgx.Tx) ([]T, error)) {
	var rows []T
	err := pgx.BeginTxFunc(ctx, d.db, pgx.TxOptions{AccessMode: pgx.ReadOnly}, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, fmt.Sprintf("set local statement_timeout = %d", d.limit.Milliseconds()))
		if err == nil {
			rows, err = ask(tx)
		}
		return err
	})
	if err == nil {
		*into = section[T]{rows: rows, at: d.now()}
		return
	}
	if into.notice == "" {
		d.log.Warn("the status page cannot show everything", "function", function, "error", err)
	}
	into.notice = d.noticeOf(err, function)
}

// noticeOf returns what a reader of the page can do about an error.
func (d *database) noticeOf(err error, function string) string {
	pgErr, isPg := errors.AsType[*pgconn.PgError](err)
	if !isPg {
		return "The database did not answer. This is tried again."
	}
	switch pgErr.Code {
	case "42501": // insufficient_privilege
		return "The server's role may not see this. The owner of the package can run: " + inspect.Grant(inspect.SomeRole, function)
	case "42883": // undefined_function
		return "The database has no " + function + ": the package is older than this program. Run: pgratelimit install"
	case "57014": // query_canceled
		return "The database took longer than " + interval(d.limit) + ", and was not waited for. On a command line, pgratelimit status waits."
	case "55P03": // lock_not_available
		return "Somebody has locked the tables, such as a migration. This is tried again."
	case "RL001": // of a search
		return "There is no such policy."
	}
	return fmt.Sprintf("The database failed: %s (%s).", pgErr.Message, pgErr.Code)
}
