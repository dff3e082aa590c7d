package tests

import (
	"context"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
)

// A load is callers who make one call after the other, until the load ends or a call fails.
type load struct {
	callers *errgroup.Group
	ctx     context.Context // done at the end of the load, and with the first call that fails
	cancel  context.CancelFunc
}

// newLoad returns a load without callers. It ends with the test at the latest.
func newLoad(t testing.TB) *load {
	l := new(load)
	var ctx context.Context
	ctx, l.cancel = context.WithCancel(context.Background())
	l.callers, l.ctx = errgroup.WithContext(ctx)
	t.Cleanup(func() { _ = l.end() })
	return l
}

// start adds callers.
func (l *load) start(callers int, call func(caller int) error) {
	for caller := range callers {
		l.callers.Go(func() error {
			for l.ctx.Err() == nil {
				if err := call(caller); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// runFor returns after a while, or when a call fails.
func (l *load) runFor(d time.Duration) {
	select {
	case <-l.ctx.Done():
	case <-time.After(d):
	}
}

// end lets the calls under way finish, and returns the first error.
func (l *load) end() error {
	l.cancel()
	return l.callers.Wait()
}
