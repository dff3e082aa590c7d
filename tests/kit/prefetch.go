package kit

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/pgratelimit/pgratelimit/client"
	"github.com/stretchr/testify/require"
)

// Instant is one that the books know.
func (db *TestDB) Instant(expression string, args ...any) time.Time {
	return One[time.Time](db.T, db.Pool, "select "+expression+" from public.books", args...)
}

// Of stocks, a PrefetchHistory has what is charged to them, granted from them and given back, in an order that is safe: a charge is
// written down before its Prefetcher hears of it, what is given back before the server does, and a grant after its caller has it.
type PrefetchHistory struct {
	Mu     sync.Mutex
	Events []PrefetchEvent
}

type PrefetchEvent struct {
	Prefetcher, Key string
	Kind            string // "charge", "grant" or "give back"
	Tokens          int64
}

func (h *PrefetchHistory) Add(e PrefetchEvent) {
	h.Mu.Lock()
	defer h.Mu.Unlock()
	h.Events = append(h.Events, e)
}

// Audit finds the first token that was granted or given back without a charge before it.
func (h *PrefetchHistory) Audit() error {
	type stock struct{ Prefetcher, Key string }
	held := map[stock]int64{}
	for n, e := range h.Events {
		of := stock{e.Prefetcher, e.Key}
		if e.Kind == "charge" {
			held[of] += e.Tokens
			continue
		}
		if held[of] -= e.Tokens; held[of] < 0 {
			return fmt.Errorf("event %d of %d: %s has %d tokens of %s for a %s that were not charged before",
				n, len(h.Events), e.Prefetcher, -held[of], e.Key, e.Kind)
		}
	}
	return nil
}

// A PatientPool has every call answered: of one that is given up after a second, the server may have charged what nobody gets.
type PatientPool struct{ *pgxpool.Pool }

func (p PatientPool) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return p.Pool.QueryRow(context.WithoutCancel(ctx), sql, args...)
}

// A RecordingPool is the pool of a Prefetcher, and writes a history.
type RecordingPool struct {
	PatientPool
	Prefetcher string
	History    *PrefetchHistory
	Bug        PrefetchBug
	Late       sync.WaitGroup // what a bug has put off
	Over       chan struct{}  // until this is closed
}

// A PrefetchBug is planted, for the audit to find. It makes the Prefetcher do what it must not.
type PrefetchBug string

const (
	GrantsOneMore  PrefetchBug = "a stock grants one more than was charged"
	GrantsTooEarly PrefetchBug = "a stock grants before the charge was answered"
	GivesBackTwice PrefetchBug = "a stock gives back twice"
)

func (p *RecordingPool) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	switch {
	case strings.Contains(sql, "ratelimit_acquire_up_to("):
		return &chargeRow{Ctx: ctx, Pool: p, sql: sql, args: args}
	case strings.Contains(sql, "ratelimit_refund("):
		p.History.Add(PrefetchEvent{p.Prefetcher, args[1].(string), "give back", args[2].(int64)})
		if p.Bug == GivesBackTwice {
			_ = p.PatientPool.QueryRow(ctx, sql, args...).Scan(make([]any, 7)...)
		}
	}
	return p.PatientPool.QueryRow(ctx, sql, args...)
}

type chargeRow struct {
	Ctx  context.Context
	Pool *RecordingPool
	sql  string
	args []any
}

// Scan makes the call. The last column is what was taken.
func (r *chargeRow) Scan(dest ...any) error {
	p, taken := r.Pool, dest[len(dest)-1].(*int64)
	call := func(by client.Querier) error { return by.QueryRow(r.Ctx, r.sql, r.args...).Scan(dest...) }
	write := func(tokens int64) { p.History.Add(PrefetchEvent{p.Prefetcher, r.args[1].(string), "charge", tokens}) }
	if p.Bug == GrantsTooEarly { // the answer is that of a transaction which is not committed, and the charge follows
		tx, err := p.Begin(r.Ctx)
		if err != nil {
			return err
		}
		err = errors.Join(call(tx), tx.Rollback(r.Ctx))
		p.Late.Go(func() {
			<-p.Over
			var tokens int64
			late := make([]any, len(dest))
			late[len(late)-1] = &tokens
			if p.Pool.QueryRow(context.Background(), r.sql, r.args...).Scan(late...) == nil {
				write(tokens)
			}
		})
		return err
	}
	err := call(p.PatientPool)
	if err == nil {
		write(*taken)
		if p.Bug == GrantsOneMore {
			*taken++
		}
	}
	return err
}

// asPrefetcher is set for a process of this test binary that is a Prefetcher.
const asPrefetcher = "RATELIMIT_TEST_AS_PREFETCHER"

// A PrefetcherProcess asks for tokens of the key hot.
type PrefetcherProcess struct {
	URL, Name, Policy string
	File              string // has its count, and outlives it
	Callers           int
	Every             time.Duration // each caller asks
	Idle              time.Duration

	*Process `json:"-"`
	Granted  *atomic.Int64 `json:"-"` // tokens
}

// be is what the process does: it asks until its standard input says to idle or ends.
func (p PrefetcherProcess) be() error {
	granted, err := countIn(p.File)
	if err != nil {
		return err
	}
	ctx := context.Background()
	config, err := pgxpool.ParseConfig(p.URL)
	if err != nil {
		return err
	}
	config.ConnConfig.RuntimeParams["application_name"] = p.Name
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return err
	}
	defer pool.Close()
	prefetcher := client.NewPrefetcher(PatientPool{pool}, client.Prefetch{Policy: p.Policy, Idle: p.Idle})
	defer prefetcher.Close()
	asking, stop := context.WithCancel(ctx)
	var callers sync.WaitGroup
	errs := make(chan error, p.Callers)
	for range p.Callers {
		callers.Go(func() {
			for asking.Err() == nil {
				begin := time.Now()
				d, err := prefetcher.Acquire(ctx, p.Policy, "hot")
				if err != nil {
					errs <- err
					return
				}
				if d.Allowed {
					granted.Add(1)
				}
				time.Sleep(max(p.Every, min(d.RetryAfter, 5*time.Millisecond)) - time.Since(begin))
			}
		})
	}
	orders := bufio.NewReader(os.Stdin)
	_, end := orders.ReadString('\n')
	stop()
	callers.Wait()
	if end == nil {
		fmt.Println("idle")
		_, _ = orders.ReadString('\n')
	}
	close(errs)
	for e := range errs {
		err = errors.Join(err, e)
	}
	return err
}

// BePrefetcher reports whether this process was one, and is done.
func BePrefetcher() bool { return BeProcess(asPrefetcher, PrefetcherProcess.be) }

// countIn is in a file that several processes have in memory.
func countIn(file string) (*atomic.Int64, error) {
	f, err := os.OpenFile(file, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	const size = unsafe.Sizeof(atomic.Int64{})
	if err := f.Truncate(int64(size)); err != nil {
		return nil, err
	}
	memory, err := syscall.Mmap(int(f.Fd()), 0, int(size), syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return (*atomic.Int64)(unsafe.Pointer(&memory[0])), nil
}

// Start starts the process.
func (p *PrefetcherProcess) Start(t *testing.T, db *TestDB) *PrefetcherProcess {
	p.URL, p.File = db.URL, filepath.Join(t.TempDir(), "granted")
	p.Granted = NoError(countIn(p.File))(t)
	p.Process = StartProcess(t, asPrefetcher, p)
	return p
}

// StopAsking returns when the process asks for no more tokens.
func (p *PrefetcherProcess) StopAsking(t *testing.T) {
	require.NoError(t, ErrorOf(fmt.Fprintln(p.Orders, "idle")))
	require.Equal(t, "idle\n", NoError(bufio.NewReader(p.Answers).ReadString('\n'))(t))
}

// Holds stops it, and reports whether it lost something now. If not, it goes on.
func (p *PrefetcherProcess) Holds(t *testing.T, lost func(p *PrefetcherProcess) int64) bool {
	p.Signal(t, syscall.SIGSTOP)
	if lost(p) > 0 {
		return true
	}
	p.Signal(t, syscall.SIGCONT)
	return false
}

func (db *TestDB) Now() time.Time {
	return One[time.Time](db.T, db.Pool, "select clock_timestamp()")
}
