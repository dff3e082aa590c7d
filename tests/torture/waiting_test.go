package torture

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/pgratelimit/pgratelimit/tests/kit"
	"github.com/stretchr/testify/require"
)

// Callers wait for one bucket of 50 tokens a second, and a third of them give up. None of the others is served before the
// instant that it was promised; these are in the order of the calls. The tokens of those who gave up are back. Nobody asks twice.
func TestTorture_WaitingInLine(t *testing.T) {
	run := kit.Torture(t, 1)
	callers := 60
	if run.Budget > 0 {
		callers = 200
	}
	db := kit.NewDB(t)
	db.DefinePolicy("line", 10, 50, kit.Second)
	var served, gaveUp int
	var due, took time.Duration
	var late []time.Duration
	var worst time.Duration
	for n := 0; run.GoesOn(); n++ {
		l := newLine(t, db, fmt.Sprint("line ", n))
		l.wait(t, callers)
		due, took = due+l.due, took+l.took
		served, gaveUp, worst = served+len(l.late), gaveUp+int(l.gaveUp.Load()), max(worst, l.scheduling)
		late = append(late, l.late...)
		run.Progress("%d served, %d gave up", served, gaveUp)
	}
	slices.Sort(late)
	run.Figure("callers who were served", served, "")
	run.Figure("tokens a second while they were, of 50", fmt.Sprintf("%.2f", 50*due.Seconds()/took.Seconds()), "")
	run.Figure("of these late by, median", late[len(late)/2].Microseconds(), "us")
	run.Figure("of these late by, most", late[len(late)-1].Microseconds(), "us")
	run.Figure("how late a timer was meanwhile, most", worst.Microseconds(), "us")
	run.Figure("callers who gave up", gaveUp, "")
}

// A waitingLine is the callers who wait for one bucket, which is in debt when they come.
type waitingLine struct {
	db      *kit.TestDB
	key     string
	limiter *client.Limiter
	calls   *callCounter

	late       []time.Duration // behind the promise
	due, took  time.Duration   // from the first who was served to the last: as promised, and as it was
	gaveUp     atomic.Int64
	scheduling time.Duration // by which a timer was late
}

func newLine(t *testing.T, db *kit.TestDB, key string) *waitingLine {
	pool, err := pgxpool.New(context.Background(), db.URL+"&pool_max_conns=16")
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	calls := &callCounter{Pool: pool, keys: map[any]string{}}
	return &waitingLine{db: db, key: key, limiter: client.New(calls), calls: calls}
}

// A callCounter counts the calls, and knows the idempotency key that each caller has drawn.
type callCounter struct {
	*pgxpool.Pool
	mu                sync.Mutex
	reserves, settles int
	keys              map[any]string
}

type callerKey struct{}

func (c *callCounter) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	row := c.Pool.QueryRow(ctx, sql, args...)
	c.mu.Lock()
	defer c.mu.Unlock()
	switch caller := ctx.Value(callerKey{}); {
	case strings.Contains(sql, "ratelimit_reserve"):
		c.reserves++
		c.keys[caller] = args[4].(string)
	case strings.Contains(sql, "ratelimit_settle"):
		c.settles++
	}
	return row
}

// wait has callers wait, and checks what became of them.
func (l *waitingLine) wait(t *testing.T, callers int) {
	const ahead = 200 // tokens, so that each has to wait, however slowly they come
	l.db.Execute("select ratelimit_charge('line', $1, 10 + $2)", l.key, ahead)
	emptied := *l.db.Bucket("line", l.key)
	require.EqualValues(t, -ahead*1_000_000, emptied.Level)

	stop := l.watchTimers()
	returned := make([]time.Time, callers)
	var all, came sync.WaitGroup
	came.Add(callers)
	for i := range callers {
		ctx, cancel := context.WithCancel(context.WithValue(context.Background(), callerKey{}, i))
		defer cancel()
		if i%3 == 0 {
			go func() {
				came.Wait() // nobody gives up before all have their promise
				time.Sleep(rand.N(500 * kit.Ms))
				cancel()
			}()
		}
		all.Go(func() {
			go func() {
				for l.promised(i) == "" {
					time.Sleep(kit.Ms)
				}
				came.Done()
			}()
			if _, err := l.limiter.Wait(ctx, "line", l.key); err != nil {
				require.ErrorIs(l.db.T, err, context.Canceled)
				l.gaveUp.Add(1)
				return
			}
			returned[i] = time.Now()
		})
	}
	all.Wait()
	l.scheduling = stop()

	promises := map[string]time.Time{}
	rows, err := l.db.Pool.Query(context.Background(), "select idempotency_key, ready_at from ratelimit.idempotency_keys where key = $1", l.key)
	require.NoError(t, err)
	var key string
	var ready time.Time
	_, err = pgx.ForEachRow(rows, []any{&key, &ready}, func() error {
		promises[key] = ready
		return nil
	})
	require.NoError(t, err)
	require.Len(t, promises, callers)
	inLine := make([]time.Time, 0, callers)
	for i := range callers {
		ready := promises[l.promised(i)]
		inLine = append(inLine, ready)
		if returned[i].IsZero() {
			continue
		}
		late := returned[i].Sub(ready)
		require.GreaterOrEqual(t, late, time.Duration(0), "nobody is early")
		l.late = append(l.late, late)
	}
	l.rate(promises, returned)
	slices.SortFunc(inLine, time.Time.Compare)
	for i, ready := range inLine {
		want := emptied.RefilledAt.Add(time.Duration(ahead+i+1) * kit.Second / 50)
		require.Equal(t, want.UnixMicro(), ready.UnixMicro(), "one token each 20 ms, and in line from the first on")
	}

	require.Equal(t, callers, l.calls.reserves, "each asks once")
	require.EqualValues(t, l.gaveUp.Load(), l.calls.settles)
	require.NotZero(t, l.gaveUp.Load())
	left := *l.db.Bucket("line", l.key)
	charged := (ahead + int64(callers) - l.gaveUp.Load()) * 1_000_000
	require.Equal(t, -charged+left.RefilledAt.Sub(emptied.RefilledAt).Microseconds()*50, left.Level, "what was given up is back")
}

// rate measures whether the line moved on at 50 tokens a second, with those of callers who gave up.
func (l *waitingLine) rate(promises map[string]time.Time, returned []time.Time) {
	first, last := -1, -1
	for i, at := range returned {
		if !at.IsZero() && (first < 0 || at.Before(returned[first])) {
			first = i
		}
		if !at.IsZero() && (last < 0 || at.After(returned[last])) {
			last = i
		}
	}
	l.due = promises[l.promised(last)].Sub(promises[l.promised(first)])
	l.took = returned[last].Sub(returned[first])
}

// promised is the idempotency key of a caller once it was sent.
func (l *waitingLine) promised(caller int) string {
	l.calls.mu.Lock()
	defer l.calls.mu.Unlock()
	return l.calls.keys[caller]
}

// watchTimers measures how late timers are, until it is told to stop.
func (l *waitingLine) watchTimers() (stop func() time.Duration) {
	done, worst := make(chan struct{}), make(chan time.Duration)
	go func() {
		var most time.Duration
		for {
			start := time.Now()
			select {
			case <-done:
				worst <- most
				return
			case <-time.After(kit.Ms):
				most = max(most, time.Since(start)-kit.Ms)
			}
		}
	}()
	return func() time.Duration {
		close(done)
		return <-worst
	}
}
