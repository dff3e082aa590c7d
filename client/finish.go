package client

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// finishTimeout is how long a call that can be undone goes on after its context has ended.
const finishTimeout = time.Second

// finishing returns a copy of l for calls whose effect is undone if their context ends. The server may carry out a call after its client has cancelled
// it, and even after another call that should undo it. So on a *pgxpool.Pool a call that has a connection waits for its answer, for up
// to [finishTimeout] after its context has ended.
func (l *limiter) finishing() *limiter {
	pool, ok := l.db.(*pgxpool.Pool)
	if !ok { // a type that embeds a pool may have a QueryRow of its own
		return l
	}
	longer := *l
	longer.db = finishingPool{pool}
	return &longer
}

type finishingPool struct{ *pgxpool.Pool }

func (p finishingPool) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return scanFunc(func(dest ...any) error {
		conn, err := p.Acquire(ctx)
		if err != nil {
			return &unsentError{err}
		}
		defer conn.Release()
		ctx, cancel := outlive(ctx, finishTimeout)
		defer cancel()
		return conn.QueryRow(ctx, sql, args...).Scan(dest...)
	})
}

type scanFunc func(dest ...any) error

func (f scanFunc) Scan(dest ...any) error { return f(dest...) }

// An unsentError is the reason why a call got no connection.
type unsentError struct{ error }

func (e *unsentError) Unwrap() error { return e.error }

// mayHaveHappened reports whether the server may have carried out a call that failed with err.
func mayHaveHappened(err error) bool {
	var unsent *unsentError
	return err != nil && isUnknown(err) && !errors.As(err, &unsent)
}

// outlive returns a context that ends d after ctx.
func outlive(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	longer, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		_ = sleep(longer, d)
		cancel()
	})
	return longer, func() { stop(); cancel() }
}
