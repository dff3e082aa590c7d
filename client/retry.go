package client

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	maxTries    = 3
	baseBackoff = 50 * time.Millisecond
	maxBackoff  = 500 * time.Millisecond
)

// retry runs try, and again after an error that says that nothing happened, if db allows it.
func retry(ctx context.Context, db Querier, try func() error) error {
	again := canRetry(db) // asked first: a failed transaction looks different afterwards
	for n := 1; ; n++ {
		err := try()
		if !again || n == maxTries || !isTransient(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w (before another try: %w)", err, ctx.Err())
		case <-time.After(backoff(n)):
		}
	}
}

// backoff is the pause after the nth try: random, so that those who collided do not meet again.
func backoff(n int) time.Duration {
	return rand.N(min(maxBackoff, baseBackoff<<(n-1)))
}

func isTransient(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) &&
		(pgErr.Code == "40001" || // serialization_failure
			pgErr.Code == "40P01") // deadlock_detected
}

// canRetry reports whether each call on db is a transaction of its own. What it does not know might
// be a transaction, and is not retried.
func canRetry(db Querier) bool {
	switch db := db.(type) {
	case pool:
		return true
	case *pgx.Conn:
		return isIdle(db)
	case poolConn:
		return isIdle(db.Conn())
	}
	return false
}

// pool is *pgxpool.Pool and whatever embeds it, told from a connection by its Close, without a
// dependency on the pool.
type pool interface {
	starter
	Close()
}

// poolConn is *pgxpool.Conn.
type poolConn interface {
	starter
	Conn() *pgx.Conn
}

// starter is what a pgx.Tx is not: it nests with Begin, and has no options to choose.
type starter interface {
	BeginTx(ctx context.Context, options pgx.TxOptions) (pgx.Tx, error)
}

func isIdle(conn *pgx.Conn) bool {
	return conn.PgConn().TxStatus() == 'I'
}
