package kit

import (
	"context"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
)

// A Load is callers who make one call after the other, until the load ends or a call fails.
type Load struct {
	Callers *errgroup.Group
	Ctx     context.Context // done at the end of the load, and with the first call that fails
	cancel  context.CancelFunc
}

// NewLoad returns a load without callers. It ends with the test at the latest.
func NewLoad(t testing.TB) *Load {
	l := new(Load)
	var ctx context.Context
	ctx, l.cancel = context.WithCancel(context.Background())
	l.Callers, l.Ctx = errgroup.WithContext(ctx)
	t.Cleanup(func() { _ = l.End() })
	return l
}

// Start adds callers.
func (l *Load) Start(callers int, call func(caller int) error) {
	for caller := range callers {
		l.Callers.Go(func() error {
			for l.Ctx.Err() == nil {
				if err := call(caller); err != nil {
					return err
				}
			}
			return nil
		})
	}
}

// RunFor returns after a while, or when a call fails.
func (l *Load) RunFor(d time.Duration) {
	select {
	case <-l.Ctx.Done():
	case <-time.After(d):
	}
}

// End lets the calls under way finish, and returns the first error.
func (l *Load) End() error {
	l.cancel()
	return l.Callers.Wait()
}

// ExactCapacity is the capacity of policies that refill one token a day: the level of a bucket tells how many tokens were taken.
const ExactCapacity = 3_000_000

func (db *TestDB) DefineExact() {
	db.DefinePolicy("durable", ExactCapacity, 1, ADay)
	db.DefinePolicy("ephemeral", ExactCapacity, 1, ADay, Ephemeral)
}
