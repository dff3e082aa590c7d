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

// The bucket is never full again, however slow the machine: a full bucket would lose what is given back.
const lineCapacity = 1_000_000

// Callers wait for one bucket of 50 tokens a second, and the last third of them give up. None of the others is served before
// the instant that it was promised; these are in the order of the calls. What was given up is back. Each caller asks once.
func TestTorture_WaitingInLineServesInTheOrderOfTheCalls(t *testing.T) {
	run := kit.Torture(t, 1)
	callers := 60
	if run.Budget > 0 {
		callers = 200
	}
	db := kit.NewDB(t)
	db.DefinePolicy("line", lineCapacity, 50, kit.Second, kit.Remember(time.Hour))
	gaveUp := 0
	var late []time.Duration
	for n := 0; run.GoesOn(); n++ {
		calls := &callCounter{Pool: kit.Pool(t, db.URL+"&pool_max_conns=16"), keys: map[any]string{}}
		l := &waitingLine{db: db, key: fmt.Sprint("line ", n), limiter: client.New(calls), calls: calls}
		l.wait(t, callers)
		late, gaveUp = append(late, l.late...), gaveUp+l.gaveUp
		run.Progress("%d served, %d gave up", len(late), gaveUp)
	}
	slices.Sort(late)
	run.Figures("callers who were served", len(late), "callers who gave up", gaveUp)
	run.Figure("of these late by, median", late[len(late)/2].Microseconds(), "us")
	run.Figure("of these late by, most", late[len(late)-1].Microseconds(), "us")
}

// A waitingLine is the callers who wait for one bucket, which is in debt when they come.
type waitingLine struct {
	db      *kit.TestDB
	key     string
	limiter *client.Limiter
	calls   *callCounter

	late   []time.Duration // behind the promise
	gaveUp int
}

// A callCounter counts the calls, and knows the idempotency key that each caller has drawn once the call is answered.
type callCounter struct {
	*pgxpool.Pool
	came    sync.WaitGroup // the callers whose reserve is yet to be answered
	settles atomic.Int64

	mu       sync.Mutex
	reserves int
	keys     map[any]string
}

type callerKey struct{}

func (c *callCounter) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	row := c.Pool.QueryRow(ctx, sql, args...)
	switch {
	case strings.Contains(sql, "ratelimit_reserve"):
		return answered{row, func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.reserves++
			c.keys[ctx.Value(callerKey{})] = args[4].(string)
			c.came.Done()
		}}
	case strings.Contains(sql, "ratelimit_settle"):
		return answered{row, func() { c.settles.Add(1) }}
	}
	return row
}

// An answered row calls then once it has been read.
type answered struct {
	pgx.Row
	then func()
}

func (r answered) Scan(dest ...any) error {
	defer r.then()
	return r.Row.Scan(dest...)
}

// wait has callers wait, and checks what became of them.
func (l *waitingLine) wait(t *testing.T, callers int) {
	const ahead = 200 // tokens, so that those who come within 4 seconds have to wait
	l.db.Execute("select ratelimit_charge('line', $1, $2)", l.key, lineCapacity+ahead)
	emptied := *l.db.Bucket("line", l.key)
	require.EqualValues(t, -ahead*1_000_000, emptied.Level)

	returned := make([]time.Time, callers)
	var all sync.WaitGroup
	stay := callers - callers/3
	l.calls.came.Add(stay)
	for i := range stay {
		all.Go(func() {
			require.NoError(l.db.T, kit.ErrorOf(l.limiter.Wait(context.WithValue(context.Background(), callerKey{}, i), "line", l.key)))
			returned[i] = time.Now()
		})
	}
	l.calls.came.Wait()
	const hour = 3600 * 50 // tokens, so that the callers who give up are behind it, however slowly they do
	l.db.Execute("select ratelimit_charge('line', $1, $2)", l.key, hour)
	l.calls.came.Add(callers - stay)
	for i := stay; i < callers; i++ {
		ctx, giveUp := context.WithCancel(context.WithValue(context.Background(), callerKey{}, i))
		defer giveUp()
		go func() {
			l.calls.came.Wait() // the keys of all are known
			time.Sleep(rand.N(500 * kit.Ms))
			giveUp()
		}()
		all.Go(func() {
			_, err := l.limiter.Wait(ctx, "line", l.key)
			require.ErrorIs(l.db.T, err, context.Canceled)
		})
	}
	all.Wait()
	l.gaveUp = callers - stay

	promises := l.promises()
	require.Len(t, promises, callers)
	var tokens, atOnce []time.Time // when each token is there, and when the callers returned who need not wait
	for i := range callers {
		before := ahead + i + 1
		if i >= stay {
			before += hour
		}
		tokens = append(tokens, time.UnixMicro(emptied.RefilledAt.Add(time.Duration(before)*kit.Second/50).UnixMicro()))
	}
	for i := range callers {
		promised := promises[l.calls.keys[i]]
		if !returned[i].IsZero() {
			late := returned[i].Sub(promised.ready)
			require.GreaterOrEqual(t, late, time.Duration(0), "nobody is early")
			l.late = append(l.late, late)
		}
		if promised.atOnce {
			atOnce = append(atOnce, returned[i])
			continue
		}
		token := slices.IndexFunc(tokens, promised.ready.Equal)
		require.GreaterOrEqual(t, token, 0, "one token each 20 ms, in line from the first on, and for one caller")
		tokens = slices.Delete(tokens, token, token+1)
	}
	slices.SortFunc(atOnce, time.Time.Compare)
	require.Len(t, atOnce, len(tokens))
	for i, at := range atOnce { // by the clock of before the lock some came earlier
		require.False(t, at.Before(tokens[i]), "a caller who need not wait had a token that was there")
	}

	require.Equal(t, callers, l.calls.reserves, "each asks once")
	// They gave up before their tokens were back: that goes on in the background.
	require.Eventually(t, func() bool { return l.calls.settles.Load() >= int64(l.gaveUp) }, kit.Patience, kit.Ms)
	require.EqualValues(t, l.gaveUp, l.calls.settles.Load(), "each settles once")
	left := *l.db.Bucket("line", l.key)
	charged := int64(ahead+hour+stay) * 1_000_000
	require.Equal(t, -charged+left.RefilledAt.Sub(emptied.RefilledAt).Microseconds()*50, left.Level, "what was given up is back")
}

// A promise is the instant at which a caller has its token.
type promise struct {
	ready  time.Time
	atOnce bool // it came when the token was there
}

// promises are the promises of all callers, by their idempotency keys.
func (l *waitingLine) promises() map[string]promise {
	promises := map[string]promise{}
	rows := kit.NoError(l.db.Pool.Query(context.Background(), `
		select idempotency_key, coalesce(ready_at, expires_at - interval '1 hour'), ready_at is null
		  from ratelimit.idempotency_keys where key = $1`, l.key))(l.db.T)
	var key string
	var promised promise
	_, err := pgx.ForEachRow(rows, []any{&key, &promised.ready, &promised.atOnce}, func() error {
		promises[key] = promised
		return nil
	})
	require.NoError(l.db.T, err)
	return promises
}

// 500 connections acquire from one bucket all the time. Each token is granted once, each decision tells how many
// tokens are left, and every connection is served.
func TestTorture_ContentionGrantsEachTokenOnce(t *testing.T) {
	run := kit.Torture(t, 0) // each connection has some calls in any case
	const connections, atLeast, capacity, few = 500, 2, 5_000_000, 750
	db, _ := kit.NewPrivateDB(t, "max_connections=520")
	db.DefinePolicy("plenty", capacity, 1, 12*time.Hour)
	db.DefinePolicy("scarce", few, 1, kit.ADay)
	left := make([]atomic.Bool, capacity) // by a grant
	var scarce, all atomic.Int64
	kit.Crowd(t, connections, func(int) error {
		conn, err := pgx.Connect(t.Context(), db.URL)
		if err != nil {
			return err
		}
		defer conn.Close(context.Background())
		by, grants := client.New(conn), 0
		for grants < atLeast || run.GoesOn() && all.Load() < capacity-connections {
			d, err := by.Acquire(t.Context(), "plenty", "k")
			if err != nil {
				return err
			} else if !d.Allowed || !left[d.Remaining].CompareAndSwap(false, true) {
				return fmt.Errorf("denied, or granted twice: %+v", d)
			}
			grants++
			run.Progress("%d grants", all.Add(1))
		}
		for range atLeast {
			d, err := by.Acquire(t.Context(), "scarce", "k")
			if err != nil {
				return err
			}
			if d.Allowed {
				scarce.Add(1)
			}
		}
		return nil
	})
	require.EqualValues(t, capacity-all.Load(), db.Left("plenty", "k"))
	require.EqualValues(t, few, scarce.Load(), "of %d requests", atLeast*connections)
	run.Figures("connections", connections, "granted on one key", all.Load())
}
