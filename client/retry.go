package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	maxTries    = 3
	baseBackoff = 50 * time.Millisecond
	maxBackoff  = 500 * time.Millisecond
)

// retry runs try, and again where a repeat can do no harm. It repeats after an error which means that nothing happened,
// if each call on db is a transaction of its own. It repeats after the loss of a connection, too, if db has other
// connections and the call does the same however often it is sent.
func retry(ctx context.Context, db Querier, once bool, try func() error) error {
	_, others := db.(Pool)
	again := isAutocommit(db) // asked first: a failed transaction looks different afterwards
	for n := 1; ; n++ {
		err := try()
		if err == nil || n == maxTries || !(again && isTransient(err) || once && others && ctx.Err() == nil && isUnknown(err)) {
			return err
		}
		if ended := sleep(ctx, backoff(n)); ended != nil {
			return fmt.Errorf("%w (before another try: %w)", err, ended)
		}
	}
}

// backoff is the pause after the nth try. It is random, so that calls that collided do not meet again.
func backoff(n int) time.Duration {
	return rand.N(min(maxBackoff, baseBackoff<<(n-1)))
}

// isTransient reports whether nothing happened, and a repeat may succeed.
func isTransient(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return ok &&
		(pgErr.Code == "40001" || // serialization_failure
			pgErr.Code == "40P01" || // deadlock_detected
			pgErr.Code == "XX000" && strings.HasPrefix(pgErr.Message, "cache lookup failed for function")) // an upgrade replaced it
}

// isUnknown reports whether the call may have happened or not: the server gave no answer, or ended the
// session with it.
func isUnknown(err error) bool {
	pgErr, ok := errors.AsType[*pgconn.PgError](err)
	return !ok || pgErr.SeverityUnlocalized == "FATAL" || pgErr.SeverityUnlocalized == "PANIC"
}

// isUnsent reports whether the server never got the call.
func isUnsent(err error) bool {
	_, refused := errors.AsType[*pgconn.ConnectError](err)
	return refused || pgconn.SafeToRetry(err) || isClosed(err)
}

// isClosed reports whether the pool was closed. Its error is puddle's, which this module does not import.
func isClosed(err error) bool { return strings.HasSuffix(err.Error(), "closed pool") }

// isAutocommit reports whether each call on db is a transaction of its own. A db of an unknown type might
// be a transaction.
func isAutocommit(db Querier) bool {
	_, isPool := db.(Pool)
	conn := connOf(db)
	return isPool || conn != nil && isIdle(conn)
}

// isInTransaction reports whether db is known to be in a transaction. Other calls on db would be part of it.
func isInTransaction(db Querier) bool {
	conn := connOf(db)
	return isTx(db) || conn != nil && !isIdle(conn)
}

// isTx reports whether db is a transaction. A pool is none, whatever other methods it has.
func isTx(db Querier) bool {
	_, isPool := db.(Pool)
	_, isTx := db.(pgx.Tx)
	return isTx && !isPool
}

// connOf is the connection that db is, or nil.
func connOf(db Querier) *pgx.Conn {
	switch db := db.(type) {
	case Pool:
	case *pgx.Conn:
		return db
	case poolConn:
		return db.Conn()
	}
	return nil
}

// poolConn is *pgxpool.Conn. A transaction has Conn, too, but no BeginTx: it nests with Begin, without options.
type poolConn interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
	Conn() *pgx.Conn
}

func isIdle(conn *pgx.Conn) bool {
	return conn.PgConn().TxStatus() == 'I'
}
